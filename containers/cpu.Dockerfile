# The locked CPU stack. From the root of a checkout: docker build -f containers/cpu.Dockerfile -t trueline:cpu .
FROM python:3.11-slim
# g++ compiles vLLM's kernels when an engine starts, and pycosat, which is published as source; vLLM loads libnuma.
# Debian keeps only the newest version of each, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 trueline && install --directory --owner=1000 /opt/trueline /runs
USER 1000
WORKDIR /opt/trueline
COPY --chown=1000 . .
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
RUN scripts/setup .venv
ENV PATH=/opt/trueline/.venv/bin:$PATH
WORKDIR /runs
ENTRYPOINT ["trueline"]
CMD ["--help"]
