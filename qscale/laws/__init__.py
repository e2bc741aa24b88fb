"""Laws of quantization degradation as products of factors, with sources and published constants."""

from qscale.laws.law import Law, Published, columns_of, from_spec
from qscale.laws.named import LAWS, get, is_named, published

__all__ = [
    "LAWS",
    "Law",
    "Published",
    "columns_of",
    "from_spec",
    "get",
    "is_named",
    "published",
]
