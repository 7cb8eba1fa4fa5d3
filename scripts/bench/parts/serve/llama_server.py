"""llama.cpp's own server, with the same weights, as a side of the server's benchmark."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxshare.models import LoadedModel
from jaxshare.models.tensor_names import expected_tensors
from scripts.bench.lib import ROOT, cores
from scripts.bench.parts.engine.random_model import MODEL
from scripts.bench.peer import WorkerError

_START_SECONDS = 120


def write_gguf(python: str, model: LoadedModel, folder: Path) -> Path:
    """Writes a model as a GGUF file, with its tokenizer; `python` has the package gguf."""
    values = {}
    for name, tensor in expected_tensors(model.config).items():
        value = model.named_params["params"]
        for part in tensor.path:
            value = value[part]
        values[name] = np.asarray(value, np.float32)
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer.json").write_text(model.tokenizer.backend_tokenizer.to_str())
    file = folder / "model.gguf"
    command = [python, "-m", "scripts.bench.peers.llama_weights", str(folder), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(f"the GGUF file could not be written: {done.stderr[-500:]}")
    return file


@contextlib.contextmanager
def llama_server(program: str, file: Path, rows: int, tokens: int) -> Iterator[int]:
    """Runs the server for so many rows of so many tokens; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(rows), "--ctx-size", str(rows * tokens), "--no-webui"]
    command += ["--threads", str(cores()), "--threads-batch", str(cores()), "--threads-http", "20"]
    with (
        file.with_suffix(".log").open("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            end = time.monotonic() + _START_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise WorkerError(f"{program} does not serve: {log.read()[-500:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
