"""KVCache: keys and values of every position seen so far, in two static allocations."""

from types import SimpleNamespace
from typing import Protocol, Self

import torch
from torch import Tensor

from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.nn.cache_rows import LARGEST, dequantize_rows, quantize_rows
from realizar_torch.ops.checks import FLOATS

CACHE_DTYPES = (*FLOATS, *LARGEST)


class CacheShape(Protocol):
    """What a cache needs to know of a model (ModelConfig has it)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values, each one tensor [layers, batch, kv_heads, max_seq_len, head_dim] of ``dtype``.

    dtype: a float type, or int8 or float8_e4m3fn, whose rows have a scale each: ``scales`` fp32 [2, layers,
    batch, kv_heads, max_seq_len], of keys and of values (``quantize_rows`` has the errors); None for floats.
    All are views of memory that ``ensure`` only ever grows: a smaller batch keeps every address.

    ``append`` writes behind ``length`` and returns everything up to and including the new rows, so a row is
    visible as soon as it is written; ``advance`` moves ``length`` once all layers have appended.
    ``starts`` (int64 [batch], on the device) is the first position of each row that is not left padding.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None
    starts: Tensor
    _keys: Tensor
    _values: Tensor
    _scales: Tensor | None
    _starts: Tensor

    def __init__(
        self,
        config: CacheShape,
        batch_size: int,
        max_seq_len: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        if dtype not in CACHE_DTYPES:
            raise FormatError(f"a cache of {dtype}; expected one of {', '.join(map(str, CACHE_DTYPES))}")
        self._config, self._device, self._dtype = config, device, dtype
        self._capacity = self.max_seq_len = 0
        self.ensure(batch_size, max_seq_len)

    @classmethod
    def over(cls, keys: Tensor, values: Tensor, length: int, scales: Tensor | None = None) -> Self:
        """A cache over tensors of the caller like ``keys`` and ``values``; ``length`` positions are filled.

        ``scales``: of 8-bit elements. For what takes memory as arguments, as an exported step does; no row is
        padded.
        """
        layers, batch_size, kv_heads, max_seq_len, head_dim = keys.shape
        if (keys.dtype in LARGEST) != (scales is not None):
            raise FormatError(f"keys of {keys.dtype} {'without' if scales is None else 'with'} scales")
        cache = cls.__new__(cls)
        cache._config = SimpleNamespace(num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)
        cache._device, cache._dtype = keys.device, keys.dtype
        cache._keys, cache._values, cache._scales = keys, values, scales
        cache._starts = torch.zeros(batch_size, dtype=torch.int64, device=keys.device)
        cache._capacity, cache.max_seq_len = batch_size, max_seq_len
        cache._view(batch_size)
        cache._length = length
        return cache

    def row(self, index: int, length: int) -> Self:
        """A cache of one sequence over the memory of row ``index``, of which ``length`` positions are filled.

        For rows that go on at positions of their own: what it appends is in this cache too, whose ``length``
        is that of no such row.
        """
        row = slice(index, index + 1)
        scales = None if self.scales is None else self.scales[:, :, row]
        return type(self).over(self.keys[:, row], self.values[:, row], length, scales)

    def ensure(self, batch_size: int, max_seq_len: int) -> bool:
        """Empties the cache and makes room for ``batch_size`` sequences of ``max_seq_len`` positions or more.

        True: the memory moved, and every pointer into it is stale. Where there is too little memory, torch's
        error leaves a cache of no positions, whose room may be asked for again.
        """
        if batch_size < 1 or max_seq_len < 1:
            raise FormatError(
                f"a cache of batch {batch_size} and length {max_seq_len}: both must be at least 1"
            )
        moved = batch_size > self._capacity or max_seq_len > self.max_seq_len
        if moved:
            larger = max(batch_size, self._capacity), max(max_seq_len, self.max_seq_len)
            # freed first: two caches need not fit
            self._allocate(0, 0)
            self._allocate(*larger)
        self._view(batch_size)
        self.starts.zero_()
        return moved

    def _view(self, batch_size: int) -> None:
        """The memory of ``batch_size`` sequences, empty and without padding."""
        self.batch_size = batch_size
        self.keys, self.values = self._keys[:, :batch_size], self._values[:, :batch_size]
        self.scales = None if self._scales is None else self._scales[:, :, :batch_size]
        self.starts = self._starts[:batch_size]
        self._length, self._padded = 0, False

    def _allocate(self, batch_size: int, max_seq_len: int) -> None:
        """Takes the place of what there is once all of it is there."""
        config = self._config
        shape = (config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim)
        packed = self._dtype in LARGEST
        # tensors of inference mode could not be written to outside of it
        with torch.inference_mode(False):
            keys, values = (torch.zeros(shape, device=self._device, dtype=self._dtype) for _ in "kv")
            scales = torch.zeros(2, *shape[:-1], dtype=torch.float32, device=self._device) if packed else None
            starts = torch.zeros(batch_size, dtype=torch.int64, device=self._device)
        self._keys, self._values, self._scales, self._starts = keys, values, scales, starts
        self._capacity, self.max_seq_len = batch_size, max_seq_len
        self._view(batch_size)

    @property
    def length(self) -> int:
        """Positions every layer holds."""
        return self._length

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.keys.dtype

    @property
    def memory_bytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return sum(part.nbytes for part in (self._keys, self._values, self._scales) if part is not None)

    def layer_scales(self, layer: int) -> dict[str, Tensor]:
        """``k_scales`` and ``v_scales`` fp32 [batch, kv_heads, max_seq_len] of a layer, as kernels take them;
        nothing where elements are floats."""
        if self.scales is None:
            return {}
        return {"k_scales": self.scales[0, layer], "v_scales": self.scales[1, layer]}

    @property
    def padded(self) -> bool:
        """True if some row begins with padding."""
        return self._padded

    def set_starts(self, starts: Tensor | None) -> None:
        """First real position of each row (int64 [batch]); None: no row is padded."""
        self._padded = starts is not None
        if starts is None:
            self.starts.zero_()
        else:
            self.starts.copy_(starts)

    def require(self, positions: int) -> None:
        """CacheFullError unless ``positions`` more fit."""
        if self._length + positions > self.max_seq_len:
            raise CacheFullError(
                f"{self._length} positions are cached and {positions} more are asked for, "
                f"but the cache holds {self.max_seq_len}; "
                "load the model with a larger max_seq_len or shorten the prompt"
            )

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes [batch, kv_heads, T, head_dim] behind ``length``; returns all rows so far, as a reader sees
        them: views of floats, or the elements of 8 bits times their scales, in the given dtype."""
        if not 0 <= layer < self.keys.shape[0]:
            raise FormatError(f"layer {layer} is outside the cache of {self.keys.shape[0]} layers")
        count = key.shape[2]
        expected = (self.batch_size, self.keys.shape[2], count, self.keys.shape[4])
        if key.shape != expected or value.shape != expected:
            raise FormatError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit a cache of {expected}"
            )
        self.require(count)
        end = self._length + count
        if self.scales is None:
            self.keys[layer, :, :, self._length : end] = key
            self.values[layer, :, :, self._length : end] = value
            return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        pairs = ((self.keys, self.scales[0], key), (self.values, self.scales[1], value))
        for memory, scales, rows in pairs:
            elements, new_scales = quantize_rows(rows, memory.dtype)
            memory[layer, :, :, self._length : end] = elements
            scales[layer, :, :, self._length : end] = new_scales
        keys, values = (
            dequantize_rows(memory[layer, :, :, :end], scales[layer, :, :, :end], rows.dtype)
            for memory, scales, rows in pairs
        )
        return keys, values

    def advance(self, positions: int) -> None:
        """Counts ``positions`` rows, appended to every layer, as cached."""
        self.require(positions)
        self._length += positions

    def rollback(self, length: int) -> None:
        """Forgets every position from ``length`` on."""
        if not 0 <= length <= self._length:
            raise FormatError(f"cannot roll back to {length}: {self._length} positions are cached")
        self._length = length

    def reset(self, zero: bool = False) -> None:
        """Empties the cache without moving it; ``zero`` also clears the memory."""
        self._length = 0
        self.set_starts(None)
        if zero:
            self.keys.zero_()
            self.values.zero_()
            if self.scales is not None:
                self.scales.zero_()
