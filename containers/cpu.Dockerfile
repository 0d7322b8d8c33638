# An image for CPUs:   docker build -f containers/cpu.Dockerfile -t megatron-pretraining:cpu .
# torch's page names an index of smaller builds without CUDA; give it with --build-arg PIP_EXTRA_INDEX_URL=... and
# --build-arg TORCH_VERSION=2.13.0+cpu.
FROM python:3.12-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_VERSION=2.13.0
COPY containers/constraints.txt /opt/constraints.txt
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}"
COPY --from=wheel /wheels /opt/wheels
RUN pip install --no-cache-dir --constraint /opt/constraints.txt \
    "$(echo /opt/wheels/*.whl)[training,hf,sft,parquet]" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /work
CMD ["python", "-m", "megatron"]
