"""How a reshard is carried out: the choice of collectives, what each rank sends, and how many bytes that is."""

from conjoin.comm.chunk_places import ChunkPlaces
from conjoin.comm.chunks import ROWS, Chunking, ChunkMove, chunking_of, is_product
from conjoin.comm.cross_mesh import (
    CHUNKS,
    InRounds,
    Message,
    TransferPlan,
    plan_transfer,
    reduced_for_transfer,
)
from conjoin.comm.edge_inputs import EdgeInput, edge_inputs
from conjoin.comm.exchanges import ExchangedBytes, NodeExchanges, node_exchanges
from conjoin.comm.gradients import Entry, GradientFlow, gradient_flow
from conjoin.comm.halo import OVER_EDGES, Halo, HaloBytes, halo_bytes, halo_call, halo_of, halo_rows, moved_edges
from conjoin.comm.made_once import MadeOnce, find_made_once
from conjoin.comm.movement import Movement, move_regions, movement
from conjoin.comm.offloads import (
    EDGE_BYTES,
    FIRST_BYTES,
    cut_blocks,
    held_in_blocks,
    num_ahead,
    num_blocks,
    score_bytes,
    updated_together,
)
from conjoin.comm.parameter_bundles import (
    BUNDLES_AHEAD,
    BundleKind,
    BundleSizes,
    ParameterBundle,
    Use,
    bundle_parameters,
    find_bundles,
    flights_backward,
    flights_forward,
    sent_bytes,
)
from conjoin.comm.per_rank import PerRank, ring_bytes, sum_per_rank
from conjoin.comm.pieces import held_bytes, num_devices, splits_evenly
from conjoin.comm.places import changes_places, changes_places_between, common_places, has_places, leaves_early
from conjoin.comm.recompute import makes_again, recomputed, run_again
from conjoin.comm.ring import Block, Ring, RingBytes, ring_bytes_of, ring_members, ring_of
from conjoin.comm.route import backward_route, dual_layout, reshard
from conjoin.comm.routing import RoutedBytes, Routing, moves_fewer_rows, routed_bytes, routed_call, routing_of
from conjoin.comm.senders import SENDER_WAYS, Assignment, Atomic
from conjoin.comm.stage_transfers import CHUNK_BYTES, plan_crossing, plan_of_transfer, stage_grid
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.comm.streams import Digests, Streams, digests, streams_of
from conjoin.comm.traffic import (
    AGREEMENT_BYTES,
    BACKWARD,
    EXCHANGE,
    FORWARD,
    RING,
    Collective,
    Traffic,
    Transfer,
    exchanges_in_passes,
    step_bytes,
    step_load,
)
from conjoin.comm.transfer_forms import Form, SentWhole, WholeSlices, form_seconds
from conjoin.comm.unit_tasks import Grid
from conjoin.comm.volume import bytes_sent, route_bytes, total_bytes

__all__ = [
    "AGREEMENT_BYTES", "BACKWARD", "BUNDLES_AHEAD", "CHUNKS", "CHUNK_BYTES", "EDGE_BYTES", "EXCHANGE", "FIRST_BYTES",
    "FORWARD", "OVER_EDGES", "RING", "ROWS", "SENDER_WAYS", "Assignment", "Atomic", "Block", "BundleKind",
    "BundleSizes", "ChunkMove", "ChunkPlaces", "Chunking", "Collective", "Digests", "EdgeInput", "Entry",
    "ExchangedBytes", "Form", "GradientFlow", "Grid", "Halo", "HaloBytes", "InRounds", "MadeOnce", "Message",
    "Movement", "NodeExchanges", "ParameterBundle", "PerRank", "Ring", "RingBytes", "Route", "RoutedBytes", "Routing",
    "SentWhole", "Step", "StepKind", "Streams", "Traffic", "Transfer", "TransferPlan", "Use", "WholeSlices",
    "backward_route", "bundle_parameters", "bytes_sent", "changes_places", "changes_places_between", "chunking_of",
    "common_places", "cut_blocks", "digests", "dual_layout", "edge_inputs", "exchanges_in_passes", "find_bundles",
    "find_made_once", "flights_backward", "flights_forward", "form_seconds", "gradient_flow", "halo_bytes", "halo_call",
    "halo_of", "halo_rows", "has_places", "held_bytes", "held_in_blocks", "is_product", "leaves_early", "makes_again",
    "move_regions",
    "moved_edges", "movement", "moves_fewer_rows", "node_exchanges", "num_ahead", "num_blocks", "num_devices",
    "plan_crossing", "plan_of_transfer", "plan_transfer", "recomputed", "reduced_for_transfer", "reshard", "ring_bytes",
    "ring_bytes_of", "ring_members", "ring_of", "route_bytes", "routed_bytes", "routed_call", "routing_of", "run_again",
    "score_bytes", "sent_bytes", "splits_evenly", "stage_grid", "step_bytes", "step_load", "streams_of", "sum_per_rank",
    "total_bytes", "updated_together",
]  # fmt: skip
