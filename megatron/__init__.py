"""Pretraining of language models: megatron.core is the library, megatron.training the app.

Other distributions may add packages of their own (`megatron.energon`), so the folders of all of them are searched.
"""

from pkgutil import extend_path
from typing import Any

from megatron.homes import install_old_homes, look_up

__path__ = extend_path(__path__, __name__)

install_old_homes()


def __getattr__(name: str) -> Any:
    return look_up(__name__, name)
