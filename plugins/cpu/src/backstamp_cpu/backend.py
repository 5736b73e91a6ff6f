"""The factories: one `BuildRequest` to one `Built`; with the modules it imports, all of the plugin that needs torch.

A factory names the kernel it built and never answers another one.
"""

from __future__ import annotations

from backstamp.factories import BuildRequest, Built
from backstamp.step_checks import check_build
from backstamp_cpu.amx import IntelAmx
from backstamp_cpu.flex import FlexAttention
from backstamp_cpu.isa import check_amx
from backstamp_cpu.linear import TorchNativeLinear
from backstamp_cpu.native import TorchNative

__all__ = [
    "build_flex_attention",
    "build_intel_amx",
    "build_torch_native",
    "build_torch_native_linear",
    "build_torch_native_rows_alone",
]


def build_torch_native(request: BuildRequest) -> Built:
    """Build `torch_native`, rows of a step grouped for speed.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    return Built("torch_native", TorchNative(request, rows_alone=False))


def build_torch_native_rows_alone(request: BuildRequest) -> Built:
    """Build `torch_native`, one row at a time: a row's bits do not depend on what shares its batch.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    return Built("torch_native", TorchNative(request, rows_alone=True))


def build_torch_native_linear(request: BuildRequest) -> Built:
    """Build `torch_native` of the linear slot.

    Raises:
        Unstamped: the runner carries no `linear_attn_backends`.
        UnsupportedBatch: a dtype, state layout or layer the row does not have.
    """
    return Built("torch_native", TorchNativeLinear(request))


def build_flex_attention(request: BuildRequest) -> Built:
    """Build `flex_attention`, compiled except on the CPU.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    return Built("flex_attention", FlexAttention(request))


def build_intel_amx(request: BuildRequest) -> Built:
    """Build `intel_amx` on a CPU whose AMX tiles oneDNN may use.

    Raises:
        UnsupportedBatch: what the row does not declare; another dtype than bf16 is refused, never rounded to it.
        BadInput: AMX out of oneDNN's reach.
    """
    check_build(request)
    check_amx(f"{request.role} attention kernel '{request.kernel}' (plugin cpu)")
    return Built("intel_amx", IntelAmx(request, rows_alone=False))
