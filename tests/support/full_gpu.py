"""What libraries say that find no GPU memory."""

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with \
NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
RUNTIME = """CUDA error: out of memory
CUDA kernel errors might be asynchronously reported at some other API call."""
TRITON = "Triton Error [CUDA]: out of memory"
ALL = {"cuBLAS": CUBLAS, "NCCL": NCCL, "CUDA runtime": RUNTIME, "Triton": TRITON}
