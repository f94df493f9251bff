# elastix and Ray, for KubeRay and for `docker run`. See docs/jobs.md, "A container".
#
#   docker build -t elastix:0.1.0 .
#   docker build -t elastix:0.1.0-cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY elastix elastix
COPY search_spaces search_spaces
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# Torch's CPU build is found beside the packages of the default index, and its version counts as newer.
# The default index alone gives the build that brings the CUDA libraries along.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# KubeRay's probes call wget. Debian keeps one version of it, so there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c /tmp/constraints.txt \
        /wheels/*.whl \
    && useradd --create-home --uid 1000 ray
USER 1000
WORKDIR /home/ray/elastix
COPY --chown=1000 jobs jobs
COPY --chown=1000 examples examples
ENV OMP_NUM_THREADS=1 \
    RAY_USAGE_STATS_ENABLED=0
CMD ["elastix", "doctor"]
