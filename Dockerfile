# One image for every pod, with GPUs or without: torch brings its own CUDA libraries, the node brings the driver.
# No model is put into it beside the demo draft, which is part of the Python package.
FROM rayproject/ray:2.60.0-py311

USER 0
# KubeRay's probes are wget in bash. Their versions are the base image's distribution's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash wget \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 1000 -g 100 /opt/paceline /var/cache/paceline

USER 1000:100
WORKDIR /opt/paceline
# torch in a layer of its own: it is most of the image, and changes less often than the rest.
COPY --chown=1000:100 constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY --chown=1000:100 pyproject.toml README.md LICENSE ./
COPY --chown=1000:100 cluster ./cluster
COPY --chown=1000:100 deployments ./deployments
COPY --chown=1000:100 protos ./protos
COPY --chown=1000:100 load_tests ./load_tests
RUN pip install --no-cache-dir -c constraints.txt .

# compute: CUDA; utility: nvidia-smi
ENV PACELINE_CACHE=/var/cache/paceline \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
