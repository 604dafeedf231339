"""Module surgery × format × device × layout: afterwards the same bytes and numbers, or our error."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import set_module_tensor_to_device
from cases import PACKED, assert_within
from packed_model import COLUMNS, ROWS, Cell, PackedModel, digest
from torch import nn
from torch.nn.utils import skip_init
from torch.optim.swa_utils import AveragedModel

import realizar_torch as rt
from realizar_torch.formats import get_format
from realizar_torch.packing import LAYOUTS

# one worker per format: it compiles a kernel once
CELLS = [
    pytest.param(
        Cell(fmt, device, layout),
        marks=(pytest.mark.xdist_group(fmt), *marks),
        id=f"{fmt}-{device}-{layout}",
    )
    for device, marks in (("cpu", ()), ("cuda", (pytest.mark.gpu,)))
    for layout in LAYOUTS
    for fmt in PACKED
]
WHOLE_NORM = {"preload_module_classes": ["FusedLayerNormLinear"]}

# --- surgeries that change no number: each gives the model that is compared with a fresh one


def _pickle(cell: Cell, model: PackedModel) -> nn.Module:
    model.state_dict()
    return pickle.loads(pickle.dumps(model))


def _save_whole(cell: Cell, model: PackedModel) -> nn.Module:
    return torch.load(_file(model), weights_only=False)


def _share_memory(cell: Cell, model: PackedModel) -> nn.Module:
    model.share_memory()
    if cell.device == "cpu":
        assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
    return model


def _five_round_trips(cell: Cell, model: PackedModel) -> nn.Module:
    for _ in range(5):
        model.to("cpu")
        model.to(cell.device)
    return model


def _swap_tensors(cell: Cell, model: PackedModel) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to("cpu", torch.float64).to(cell.device, torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _load_file(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1)
    other.load_state_dict(torch.load(_file(model.state_dict())))
    return other


def _load_bare(cell: Cell, model: PackedModel) -> nn.Module:
    other, size = cell.build(seed=1), get_format(cell.fmt).row_bytes(COLUMNS)
    alike = [fmt for fmt in PACKED if get_format(fmt).row_bytes(COLUMNS) == size]
    with nullcontext() if len(alike) == 1 else pytest.warns(UserWarning, match="have as many bytes"):
        other.load_state_dict(dict(model.state_dict()), strict=False)
    return other


def _load_assign(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1)
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def _load_into_meta(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1).to("meta")
    with pytest.raises(rt.FormatError, match="on meta"):
        other.linear(cell.inputs()[1])
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def _to_empty(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1).to("meta").to_empty(device=cell.device)
    other.load_state_dict(model.state_dict())
    return other


def _skip_init(cell: Cell, model: PackedModel) -> nn.Module:
    old = model.linear
    options = {"fmt": cell.fmt, "device": cell.device}
    model.linear = skip_init(rt.QuantizedLinear, old.in_features, old.out_features, **options)
    rt.prepack(model.linear, cell.layout)
    model.linear.load_state_dict(old.state_dict())
    return model


def _init_empty_weights(cell: Cell, model: PackedModel) -> nn.Module:
    with accelerate.init_empty_weights(include_buffers=True):
        assert rt.QuantizedLinear(COLUMNS, ROWS, fmt=cell.fmt).weight.is_meta
    with accelerate.init_empty_weights():
        other = PackedModel(cell.fmt, seed=1)
    rt.prepack(other, cell.layout)
    assert all(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def _set_module_tensor(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1).to("meta")
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        set_module_tensor_to_device(other, name, cell.device, value=tensor)
    return other


def _functional_call(cell: Cell, model: PackedModel) -> nn.Module:
    other = cell.build(seed=1)
    before = digest(other)
    tensors = dict((*model.named_parameters(), *model.named_buffers(remove_duplicate=False)))
    cell.check(lambda *inputs: torch.func.functional_call(other, tensors, inputs))
    assert digest(other) == before
    return model


def _average(cell: Cell, model: PackedModel) -> nn.Module:
    """An EMA of what is trained: packed bytes have no average."""

    def update(averages: list[torch.Tensor], values: list[torch.Tensor], _: torch.Tensor) -> None:
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, values, 0.1)

    average = AveragedModel(model, multi_avg_fn=update)
    for _ in range(3):
        average.update_parameters(model)
    return average.module


def _train(cell: Cell, model: PackedModel) -> nn.Module:
    """One step of AdamW, then the floats as they were."""
    before = {name: value.clone() for name, value in model.named_parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if cell.runs:
        torch.cat([y.flatten() for y in model(*cell.inputs())]).square().mean().backward()
        torch.optim.AdamW(trained, lr=0.1).step()
        assert all(parameter.grad.count_nonzero() for parameter in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                assert not (cell.runs and torch.equal(parameter, before[name]))
                parameter.copy_(before[name])
    return model


def _cpu_offload(cell: Cell, model: PackedModel) -> nn.Module:
    accelerate.cpu_offload(model, torch.device(cell.device), **WHOLE_NORM)
    return _use_offloaded(cell, model)


def _disk_offload(cell: Cell, model: PackedModel) -> nn.Module:
    with TemporaryDirectory() as folder:
        accelerate.disk_offload(model, folder, torch.device(cell.device), **WHOLE_NORM)
        return _use_offloaded(cell, model)


def _use_offloaded(cell: Cell, model: PackedModel) -> nn.Module:
    """Weights come for one call and go."""
    for _ in range(2):
        cell.check(model)
        assert model.linear.bias.is_meta
    remove_hook_from_submodules(model)
    return model


def _file(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


EXACT: dict[str, Callable[[Cell, PackedModel], nn.Module]] = {
    "to": lambda cell, model: model.to(cell.device, torch.float32, non_blocking=True),
    "five round trips": _five_round_trips,
    "swap tensors": _swap_tensors,
    "requires_grad_(False)": lambda cell, model: model.requires_grad_(False).eval(),
    "deepcopy": lambda cell, model: copy.deepcopy(model),
    "pickle": _pickle,
    "torch.save": _save_whole,
    "share_memory": _share_memory,
    "load from a file": _load_file,
    "load a bare dict": _load_bare,
    "load by assignment": _load_assign,
    "load into meta": _load_into_meta,
    "to_empty": _to_empty,
    "skip_init": _skip_init,
    "init_empty_weights": _init_empty_weights,
    "set_module_tensor_to_device": _set_module_tensor,
    "functional_call": _functional_call,
    "average": _average,
    "train": _train,
    "cpu_offload": _cpu_offload,
    "disk_offload": _disk_offload,
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("surgery", EXACT.values(), ids=EXACT)
def test_no_number_changes(surgery: Callable[[Cell, PackedModel], nn.Module], cell: Cell) -> None:
    expected = digest(cell.build(layout="ggml"))
    model = surgery(cell, cell.build())
    assert len(expected) == 7 and digest(model) == expected
    assert {module.layout for module in model.children() if module is not model.fused} == {cell.layout}
    cell.check(model)
    rt.unpack(model)
    assert digest(model) == expected
    Cell(cell.fmt, cell.device, "ggml").check(model)


# --- casts: the bytes stay, the rest computes in the new type

CASTS = {
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "double": (lambda model: model.double(), torch.float64),
    "to(float16)": (lambda model: model.to(torch.float16), torch.float16),
    "to(like)": (lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)), torch.bfloat16),
    "half, then float": (lambda model: model.half().float(), torch.float32),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_the_bytes_alone(cast: str, cell: Cell) -> None:
    change, dtype = CASTS[cast]
    plain, model = cell.build(layout="ggml"), change(cell.build()).to(cell.device)
    assert digest(model) == digest(plain)
    if not cell.runs:
        rt.unpack(model)
    ids, x = cell.inputs(dtype)
    # one rounding each of the parameters, the normalised row and the output, to 11 bits in a detour by half
    step = max(torch.finfo(dtype).eps, 2**-11 if cast == "half, then float" else 1e-6)
    rounding = plain.rounding(ids, x.float())
    for y, exact, size in zip(model(ids, x), plain.double()(ids, x.double()), rounding, strict=True):
        assert y.dtype == dtype
        assert_within(y, exact, 2 * step * size.double())


# --- surgeries that are refused, by torch or by this package, before a number is wrong


def _load(
    cell: Cell, model: PackedModel, change: Callable[[torch.Tensor], torch.Tensor], assign: bool
) -> None:
    state = model.state_dict()
    state["linear.weight"] = change(state["linear.weight"])
    model.load_state_dict(state, assign=assign)


def _load_another_format(cell: Cell, model: PackedModel) -> None:
    fmt = PACKED[PACKED.index(cell.fmt) - 1]
    model.load_state_dict(Cell(fmt, cell.device, cell.layout).build().state_dict())


def _load_another_width(cell: Cell, model: PackedModel) -> None:
    """Of one weight less, which as many blocks hold."""
    narrow = rt.QuantizedLinear(COLUMNS - 1, ROWS, fmt=cell.fmt, device=cell.device)
    rt.prepack(narrow, cell.layout)
    narrow.load_state_dict(model.linear.state_dict())


def _forward(cell: Cell, model: PackedModel) -> None:
    model.linear(cell.inputs()[1])


def _offload_in_parts(cell: Cell, model: PackedModel) -> None:
    accelerate.cpu_offload(model, torch.device(cell.device))
    model.fused(cell.inputs()[1])


REFUSED = {
    "type": (lambda c, m: _forward(c, m.type(torch.float16)), rt.FormatError, r"module\.type\(dtype\) casts"),
    "requires_grad_(True)": (lambda c, m: m.requires_grad_(True), RuntimeError, "floating point"),
    "load floats": (lambda c, m: _load(c, m, torch.Tensor.float, False), rt.FormatError, "float32, expected"),
    "assign floats": (lambda c, m: _load(c, m, torch.Tensor.half, True), rt.FormatError, "float16, expected"),
    "load int8": (lambda c, m: _load(c, m, torch.Tensor.char, True), rt.FormatError, "int8, expected"),
    "load too few rows": (lambda c, m: _load(c, m, lambda w: w[1:], False), RuntimeError, r"linear\.weight"),
    "assign too few rows": (lambda c, m: _load(c, m, lambda w: w[1:], True), RuntimeError, r"linear\.weight"),
    "load another format": (_load_another_format, rt.FormatError, "stored as {other}, .* made for {fmt}"),
    "load another width": (_load_another_width, rt.FormatError, "rows of 300 weights, .* made for 299"),
    "forward on meta": (lambda c, m: _forward(c, m.to("meta")), rt.FormatError, "weight is on meta"),
    "offload a norm in parts": (_offload_in_parts, rt.FormatError, "preload_module_classes"),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("surgery", REFUSED)
def test_what_cannot_be_right_is_refused(surgery: str, cell: Cell) -> None:
    act, error, message = REFUSED[surgery]
    other = PACKED[PACKED.index(cell.fmt) - 1]
    with pytest.raises(error, match=message.format(fmt=cell.fmt, other=other)):
        act(cell, cell.build())
