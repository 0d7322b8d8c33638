"""Serves a trained model over HTTP, in OpenAI's form.

python tools/serve.py --load runs/quickstart/checkpoints
torchrun --nproc_per_node 2 tools/serve.py --load runs/large/checkpoints --tensor-model-parallel-size 2

http://127.0.0.1:8000/ is a page to talk to the model; see docs/serving.md for clients, limits and metrics.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.conversion.hub_run import load_hub_weights
from megatron.core.exceptions import UserError
from megatron.serving.config import ModelToServe, ServeConfig
from megatron.serving.serve import say, serve
from megatron.training.config.inference_layout import InferenceLayout
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.trained_model import open_trained_model
from tools.entry_scripts import build_model, words_given_again

USAGE = "python tools/serve.py --load DIR [flags]"
ABOUT = (
    "Serves a trained model over HTTP: /v1/completions, /v1/chat/completions and /v1/models as OpenAI's clients expect "
    "them, and a page to talk to the model. SIGTERM and Ctrl-C end it."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sections = [Section("model", ModelToServe), Section("server", ServeConfig), Section("layout", InferenceLayout)]
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        source, config, layout = read_tool_flags(sys.argv[1:] if argv is None else argv, sections, USAGE, ABOUT)
        config.read_api_key()
        with open_trained_model(
            build_model,
            source.load or "",
            source.ckpt_step,
            words_given_again(source),
            log=say if is_first else lambda sentence: None,
            average=source.ema,
            layout=layout,
            base=source.base,
            load_hub=load_hub_weights,
        ) as trained:
            return serve(trained, source, config)
    except UserError as error:
        for line in str(error).splitlines() if is_first else []:
            say(f"error: {line}")
        return 2


if __name__ == "__main__":
    run_main(main)
