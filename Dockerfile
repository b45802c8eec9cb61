# With GPUs, on torch's CUDA build, which brings its own CUDA libraries (the host needs a driver only):
#   docker build -t shardwise . && docker run --gpus all --ipc=host shardwise
# For CPU ranks, name the package index of torch's CPU builds (the install selector on pytorch.org prints it):
#   docker build --build-arg TORCH_INDEX=... -t shardwise:cpu . && docker run shardwise:cpu
FROM python:3.12-slim
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11,<2.16"
COPY pyproject.toml README.md LICENSE /src/
COPY shardwise /src/shardwise
RUN pip install --no-cache-dir "/src[hf,lightning]" && rm -rf /src
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["shardwise"]
CMD ["env"]
