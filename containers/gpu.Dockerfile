# vLLM for NVIDIA GPUs. From the root of a checkout: docker build -f containers/gpu.Dockerfile -t trueline:gpu .
# PyTorch's wheels hold CUDA's libraries; the machine brings the driver: docker run --gpus all --shm-size 16g ...
FROM python:3.11-slim
# Triton compiles launchers of its kernels when a run starts. Debian keeps only the newest version, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 trueline && install --directory --owner=1000 /opt/trueline /runs
USER 1000
WORKDIR /opt/trueline
RUN python -m venv venv
ENV PATH=/opt/trueline/venv/bin:$PATH
COPY --chown=1000 pyproject.toml README.md LICENSE source/
COPY --chown=1000 trueline source/trueline
RUN pip install --no-cache-dir './source[gpu]' && rm -rf source
WORKDIR /runs
ENTRYPOINT ["trueline"]
CMD ["--help"]
