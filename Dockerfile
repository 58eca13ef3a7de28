# Paceline on the official PyTorch image, whose torch and CUDA are kept as they are.
#
#   docker build -t paceline .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" paceline train recipes/demo_gpu.toml
#
# --ipc=host: NCCL between the GPUs of a machine uses shared memory.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime

WORKDIR /opt/paceline
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# constraints.txt pins the torch that CI tests; the image's own is kept instead
RUN python -c "import torch; print(f'torch=={torch.__version__}')" >/tmp/constraints.txt \
    && grep -v -i -E '^torch(\+|==| |$)' constraints.txt >>/tmp/constraints.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir -c /tmp/constraints.txt . \
    && rm /tmp/constraints.txt
COPY recipes /opt/paceline/recipes

RUN useradd --create-home trainer && mkdir /work && chown trainer /work
USER trainer
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD ["--help"]
