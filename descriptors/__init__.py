"""What a tensor and an op *are*: pure, frozen, hashable data. Imports no torch and nothing else of ours."""

from .dims import Dim, Dims, DimsLike, Sym, SymProduct, bind_dim, dim_max, is_symbolic, sym
from .dtype import DType
from .errors import FrostError, WireError
from .limits import LIMITS, Limits
from .masks import ALIGNMENTS, MaskDesc
from .nsa_ops import (
    NSA_TYPES,
    NsaCompressBwdDesc,
    NsaCompressDesc,
    NsaCompressedBwdDesc,
    NsaCompressedDesc,
    NsaSelectionBwdDesc,
    NsaSelectionDesc,
    NsaTopkDesc,
)
from .ops import (
    OP_TYPES,
    OpDesc,
    PointwiseDesc,
    SdpaBwdDesc,
    SdpaDesc,
    op_from_wire,
    op_to_wire,
)
from .tensor import TensorDesc, may_share_memory, row_major
from .wire import pack, parse_json, unpack

__all__ = [
    "ALIGNMENTS", "DType", "Dim", "Dims", "DimsLike", "FrostError", "LIMITS", "Limits", "MaskDesc", "NSA_TYPES", "NsaCompressBwdDesc", "NsaCompressDesc",
    "NsaCompressedBwdDesc", "NsaCompressedDesc", "NsaSelectionBwdDesc", "NsaSelectionDesc", "NsaTopkDesc", "OP_TYPES",
    "OpDesc", "PointwiseDesc",
    "SdpaBwdDesc", "SdpaDesc", "Sym", "SymProduct", "TensorDesc", "WireError", "bind_dim", "dim_max",
    "is_symbolic", "may_share_memory", "op_from_wire", "op_to_wire", "pack", "parse_json", "row_major", "sym", "unpack",
]
