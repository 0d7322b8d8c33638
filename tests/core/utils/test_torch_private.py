"""torch's private names exist in the installed release, and stand in one file."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.utils import torch_private

ROOT = Path(__file__).parents[3]


def test_it_was_tried_with_these_releases() -> None:
    assert torch_private.TRIED_RELEASES == ("2.11", "2.13")


@pytest.mark.parametrize(
    "name",
    [
        "_C._current_graph_task_id",
        "_C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        "_C._profiler._ExperimentalConfig",
        "_C._cuda_endAllocateToPool",
        "_C.DisableTorchFunctionSubclass",
        "_foreach_copy_",
        "_foreach_norm",
        "_foreach_zero_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_index_put_impl_",
        "_scaled_mm",
        "autograd.Variable._execution_engine.queue_callback",
        "cuda._sleep",
        "distributed.distributed_c10d._hash_ranks_to_str",
        "distributed.distributed_c10d._set_pg_timeout",
        "ops.aten._flash_attention_backward",
        "ops.aten._flash_attention_forward",
        "ops.aten._scaled_dot_product_cudnn_attention",
        "ops.aten._scaled_dot_product_cudnn_attention_backward",
        "utils._python_dispatch.TorchDispatchMode",
        "utils._pytree.tree_leaves",
    ],
)
def test_the_name_exists(name: str) -> None:
    found: object = torch
    for word in name.split("."):
        found = getattr(found, word)  # AttributeError: this release of torch has no such name


def test_the_name_of_a_group_made_by_its_members_is_found_by_the_function_that_is_replaced() -> None:
    """The replacement works only as long as torch asks this function, as a global of its module."""
    assert "_hash_ranks_to_str(" in inspect.getsource(distributed_c10d._process_group_name)
    before = distributed_c10d._hash_ranks_to_str
    with torch_private.local_group_named("name of a test"):
        assert distributed_c10d._hash_ranks_to_str([0, 1]) == "name of a test"
    assert distributed_c10d._hash_ranks_to_str is before
    assert hasattr(dist.ProcessGroup, "bound_device_id")  # public, and set by create_group_among_members


def private_names(path: Path) -> list[str]:
    """Names with a leading underscore that are read of torch, directly or below one of its modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules, found = {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            modules |= {alias.asname or alias.name for alias in node.names}
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in imported if any(map(is_private, name.split(".")))]
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            modules |= {alias.asname for alias in names if alias.asname}
            found += [alias.name for alias in names if any(map(is_private, alias.name.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_file_uses_a_private_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import torch.distributed as dist\nimport torch, torch._a\nfrom torch.utils import data, _b\n"
        "torch._foreach_norm([])\ndist.x._y(torch.z)\n"
    )
    assert private_names(bad) == ["torch._a", "torch.utils._b", "torch._foreach_norm", "dist.x._y"]
    own = Path(torch_private.__file__)
    files = [path for folder in ("megatron", "tools") for path in (ROOT / folder).rglob("*.py") if path != own]
    assert len(files) > 200 and private_names(own)
    assert {str(path): names for path in files if (names := private_names(path))} == {}


def test_a_callback_comes_once_at_the_end_of_each_backward() -> None:
    log: list[str] = []
    callback = torch_private.BackwardEndCallback(lambda: log.append("end"))
    weight = torch.ones(2, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        assert torch_private.in_backward()
        callback.expect()
        callback.expect()
        log.append("hook")

    callback.expect()  # outside of a backward pass: ignored
    for _ in range(2):
        first = weight * 2
        first.register_hook(hook)
        (first * 3).sum().backward()
    assert log == ["hook", "end", "hook", "end"] and not torch_private.in_backward()
