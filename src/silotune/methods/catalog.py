"""The built-in methods, in the order in which `silotune methods` prints them, and the aggregations beside them."""

from __future__ import annotations

from silotune.aggregation import AGGREGATIONS
from silotune.config import registries
from silotune.methods import Method
from silotune.methods.apfl import APFL
from silotune.methods.ditto import Ditto
from silotune.methods.fdlora import FDLoRA
from silotune.methods.fedalt import FedALT, RestOfWorld
from silotune.methods.fedavg import FedAP, FedAvg, FedAvgFull, FedAvgServer, FedLR, FedPer, FedPrompt, FedRep
from silotune.methods.feddpa import FedDPAF, FedDPAT
from silotune.methods.feddyn import FedDyn
from silotune.methods.fedfame import FedFAME
from silotune.methods.fedit import FedIT
from silotune.methods.fedlora import FedLoRA
from silotune.methods.fedmatch import FedMatch
from silotune.methods.fedmcp import FedMCP
from silotune.methods.fedmomentum import BalancedSVD, FedMomentum
from silotune.methods.fedproto import FedProto
from silotune.methods.fedprox import FedProx
from silotune.methods.fedrot import FedRotLoRA
from silotune.methods.flora_na import FLoRANA, MixedFactors
from silotune.methods.hetlora import HetLoRA, NormWeightedMeans
from silotune.methods.ifca import IFCA, GroupMeans
from silotune.methods.la_lora import LALoRA
from silotune.methods.local import Centralized, Local, ServerOnly
from silotune.methods.lora_factors import FedSALoRA, FFALoRA, RoLoRA
from silotune.methods.lora_products import (
    FactorSVD,
    FedExLoRA,
    FedSVD,
    FlexLoRA,
    FLoRA,
    LoRAFAIR,
    MeansAndResidual,
    ProductSVD,
    StackedProducts,
)
from silotune.methods.moon import MOON
from silotune.methods.pfedme import PFedMe
from silotune.methods.ravan import RAVAN
from silotune.methods.scaffold import SCAFFOLD

BUILT_IN: tuple[type[Method], ...] = (
    *(Local, Centralized, ServerOnly, FedAvg, FedAvgFull, FedProx, SCAFFOLD, FedDyn),
    *(FedAP, FedLR, MOON, FedRep, FedPer, FedMatch, Ditto, APFL, PFedMe, FedMCP, FedFAME, FedAvgServer),
    *(FedProto, FedPrompt, FedIT, FedLoRA, FedDPAF, FedDPAT),
    *(FFALoRA, FedSALoRA, RoLoRA, FlexLoRA, HetLoRA, FedSVD, FedExLoRA, FLoRA, LoRAFAIR, FDLoRA, FedALT),
    *(FedRotLoRA, FedMomentum, FLoRANA, LALoRA, RAVAN, IFCA),
)

OF_METHODS = (
    ProductSVD,
    NormWeightedMeans,
    FactorSVD,
    MeansAndResidual,
    StackedProducts,
    RestOfWorld,
    BalancedSVD,
    MixedFactors,
    GroupMeans,
)
"""Aggregations of one method that others may choose, too; LoRA-FAIR's is made with a key of the section."""

registries.METHODS.built_in = {method.name: method for method in BUILT_IN}

registries.AGGREGATIONS.built_in = {**AGGREGATIONS, **{kind.name: kind for kind in OF_METHODS}}
