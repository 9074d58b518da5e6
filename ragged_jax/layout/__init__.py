"""What lives where: tensors, blocks, slabs, buckets and layouts, as immutable values.

This package knows no framework (numpy at most); `torch_bridge` uses the same code.
"""

from ._block import Block as Block
from ._block import BlockRule as BlockRule
from ._block import block_for as block_for
from ._block import elements as elements
from ._block import rows as rows
from ._block import tile as tile
from ._block import whole as whole
from ._boxes import Box as Box
from ._boxes import boxes as boxes
from ._dims import Link as Link
from ._dtypes import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from ._dtypes import itemsize as itemsize
from ._errors import STRICT as STRICT
from ._errors import LayoutError as LayoutError
from ._json import Document as Document
from ._json import distinct_keys as distinct_keys
from ._known_names import NAME_MAPS as NAME_MAPS
from ._layout import Layout as Layout
from ._layout import Location as Location
from ._layout import Piece as Piece
from ._listed import listed as listed
from ._listed import named as named
from ._manifest import disagreement as disagreement
from ._manifest import from_text as from_text
from ._manifest import manifest as manifest
from ._manifest import to_text as to_text
from ._names import Mapped as Mapped
from ._names import NameMap as NameMap
from ._names import NameMapError as NameMapError
from ._names import NameRule as NameRule
from ._order import row_major_index as row_major_index
from ._order import stored_index as stored_index
from ._overlap import Buffer as Buffer
from ._overlap import Move as Move
from ._overlap import Order as Order
from ._overlap import Segment as Segment
from ._overlap import cut_runs as cut_runs
from ._overlap import overlap as overlap
from ._overlap import segments as segments
from ._overlap import stored_runs as stored_runs
from ._ragged_shard import RaggedShard as RaggedShard
from ._ragged_shard import StridedRaggedShard as StridedRaggedShard
from ._slab import Bucket as Bucket
from ._slab import Placement as Placement
from ._slab import Slab as Slab
from ._storage import Storage as Storage
from ._storage import TileRegion as TileRegion
from ._storage import can_be_tiled as can_be_tiled
from ._storage import cuts as cuts
from ._storage import stored_order as stored_order
from ._storage import tile_regions as tile_regions
from ._tensor import Split as Split
from ._tensor import TensorSpec as TensorSpec
