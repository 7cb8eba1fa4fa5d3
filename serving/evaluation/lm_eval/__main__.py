"""The command line of lm_eval, which knows `--model jaxshare` besides its own models.

lm_eval has no entry points for models of other packages, so that they are to be registered before
its command line starts.
"""

import importlib
import sys


def main() -> int:
    """Runs lm_eval's command line; returns 1 where it is not installed."""
    try:
        # Its own models, which lm_eval registers by itself only while there is none.
        importlib.import_module("lm_eval.models")
        registry = importlib.import_module("lm_eval.api.registry")
        command = importlib.import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        print(
            "jaxshare: error: lm_eval is not installed; `pip install 'jaxshare[lm-eval]'` has it",
            file=sys.stderr,
        )
        return 1
    registry.model_registry.register("jaxshare", target=f"{__package__}.model:JaxshareLM")
    command.cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
