# An image for NVIDIA GPUs:   docker build -f containers/cuda.Dockerfile -t megatron-pretraining:cuda .
# torch's Linux packages bring CUDA, cuDNN, NCCL and Triton; the host brings the driver. The full Python image has the C
# compiler that Triton calls.
FROM python:3.12-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-bookworm
ARG TORCH_VERSION=2.13.0
# The libraries through which NCCL uses InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
COPY containers/constraints.txt /opt/constraints.txt
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}"
COPY --from=wheel /wheels /opt/wheels
RUN pip install --no-cache-dir --constraint /opt/constraints.txt \
    "$(echo /opt/wheels/*.whl)[training,hf,sft,parquet,ssm]" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /work
CMD ["python", "-m", "megatron"]
