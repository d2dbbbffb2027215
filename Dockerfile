# The README's two commands on a CPU:
#
#     docker build -t torchrec-recstore .
#     docker run --rm torchrec-recstore                    # make train
#     docker run --rm torchrec-recstore make test
#     docker run --rm torchrec-recstore recstore --help
#
# tests/project/package/test_dockerfile.py runs these steps in a clean directory, without an engine.
FROM python:3.11-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends g++ make redis-server && rm -rf /var/lib/apt/lists/*

# Where pip finds torch without CUDA; empty: where the index of pip's own configuration has it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1
ENV PATH=/torchrec_recstore/.venv/bin:$PATH

WORKDIR /torchrec_recstore

# Packages first: they change less often than the code.
COPY Makefile ./
COPY requirements ./requirements
RUN make .venv/.dev-requirements

COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY packaging ./packaging
COPY torchrec_recstore ./torchrec_recstore
COPY service ./service
COPY serving ./serving
RUN make build

COPY . .
CMD ["make", "train"]
