# trt-lora on a CPU. `runtime` is a deployment: the wheel and what it needs, run by no root. `demo`
# adds the builder, and is a checkout in which `make demo`'s program runs.
FROM python:3.12.11-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.11-slim-bookworm AS runtime
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[cpu,serve]"
RUN useradd --create-home --uid 1000 lora
USER 1000
WORKDIR /home/lora
ENTRYPOINT ["trt-lora"]
CMD ["--help"]

FROM python:3.12.11-slim-bookworm AS demo
RUN useradd --create-home --uid 1000 lora && install -d -o lora /demo /demo/build /demo/engines
WORKDIR /demo
COPY --chown=lora . .
# torch from PyPI brings gigabytes of CUDA packages; gguf reads the demo model.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    torch==2.13.0+cpu gguf==0.19.0 --editable '.[export,cpu,text]'
USER 1000
CMD ["python", "-m", "trt_lora.scripts.demo"]
