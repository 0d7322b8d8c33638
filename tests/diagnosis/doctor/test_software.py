"""Versions and variables."""

import platform

import torch

from megatron.diagnosis.doctor.software import examine_software


def test_versions_and_variables() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "NCCL_SOCKET_IFNAME": "eth7", "NCCL_IB_DISABLE": "1"}
    section = examine_software(environ)
    facts = {fact.name: fact for fact in section.facts}
    assert facts["Python"].text == platform.python_version() and facts["torch"].text == torch.__version__
    assert facts["torch"].if_different == "fault" and facts["NCCL_DEBUG"].if_different == "warning"
    assert facts["NCCL_SOCKET_IFNAME"].if_different is None and "HOME" not in facts
    (warning,) = section.findings
    assert warning.text.startswith("NCCL_IB_DISABLE=1 is set: nodes then exchange through TCP")
    assert not examine_software({"NCCL_IB_DISABLE": "0"}).findings
