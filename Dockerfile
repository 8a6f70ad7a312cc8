# Everything that the first hour on a GPU needs, but its driver (580 or newer):
#
#     docker build --build-arg COMMIT="$(git describe --always --dirty --abbrev=40)" -t rlhf-pg .
#     mkdir -m 777 -p reports
#     docker run --gpus all --shm-size 8g -v "$PWD/reports:/reports" rlhf-pg
#
# runs tests/gpu/run.sh and leaves reports/gpu_report.json. For an older driver, from 560 on:
# --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-devel. With vLLM, which wants an older
# transformers than TRL's comparison was tested with:
# --build-arg EXTRAS=deepspeed,quantization,vllm --build-arg CONSTRAINTS=/dev/null
#
# The larger image, with nvcc: DeepSpeed compiles its optimizers for offloading.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

ARG EXTRAS=deepspeed,quantization,trl
ARG CONSTRAINTS=constraints.txt

# A C compiler and Python's headers, which torch.compile and triton need.
# Without versions, since the distribution keeps no older ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home user \
    && mkdir /reports /home/user/rlhf_pg \
    && chown user /reports /home/user/rlhf_pg
USER 10001
WORKDIR /home/user/rlhf_pg

# An environment that has the image's torch; the distribution's own packages stay as they are.
RUN python3 -m venv --system-site-packages /home/user/venv
ENV PATH=/home/user/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

COPY --chown=10001 . .
RUN pip install --constraint "${CONSTRAINTS}" --editable ".[${EXTRAS}]"

# What the report says of the source, whose history is not in the image.
ARG COMMIT=unknown
ENV RLHF_PG_COMMIT=${COMMIT}
CMD ["tests/gpu/run.sh", "--json", "/reports/gpu_report.json"]
