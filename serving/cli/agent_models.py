"""The models of `jaxshare agents run` at endpoints, and pieces of answers as they come."""

import argparse
import json
import os
import sys

from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.agents.streaming import AnswerPiece


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --endpoint, --key-variable and --stream."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="address of an API with OpenAI's protocol, such as http://localhost:8000/v1, whose "
        "model --model names",
    )
    parser.add_argument(
        "--key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the endpoint's key, which is sent if it is set (default "
        "%(default)s)",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="show answers as they come: on stderr, or with --json on stdout, one object a line, the "
        "report last",
    )


def endpoint_model(options: argparse.Namespace) -> tuple[OpenAIModel, str]:
    """Returns the model at options.endpoint, and its name for the report.

    Raises:
      ValueError: no name, no address, or a key that no header can carry; openai is not installed.
    """
    if options.model is None:
        raise ValueError("--endpoint is given without --model; give the model's name there")
    try:
        key = os.environ.get(options.key_variable) or None
        model = OpenAIModel(options.model, base_url=options.endpoint, api_key=key)
    except (ValueError, ImportError) as error:
        raise ValueError(f"--endpoint {options.endpoint} cannot be used: {error}") from None
    return model, f"{options.model} at {model.base_url}"


class PieceWriter:
    """Writes pieces of answers as they come; agents side by side in turns, each under its name.

    Args:
      as_json: one object a line on stdout, with the fields of `AnswerPiece`; else text on stderr.
    """

    def __init__(self, as_json: bool):
        self._as_json = as_json
        self._shown: object = None

    def write(self, piece: AnswerPiece) -> None:
        """Writes the next piece."""
        if self._as_json:
            fields = {name: getattr(piece, name) for name in AnswerPiece.__slots__}
            print(json.dumps(fields), flush=True)
            return
        about = (piece.run, piece.state, piece.seed, piece.is_reasoning)
        if piece.text and about != self._shown:
            self.end()
            state = ".".join(map(str, piece.state))
            thinks = " thinks" if piece.is_reasoning else ""
            print(f"[{piece.run} {state}{thinks}] ", end="", file=sys.stderr)
            self._shown = about
        print(piece.text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the line that is open."""
        if self._shown is not None:
            print(file=sys.stderr, flush=True)
        self._shown = None
