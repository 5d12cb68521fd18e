"""`BUILT_IN`: the classes of the built-in methods, in the order in which `silotune methods` prints them."""

from __future__ import annotations

from silotune.methods import Method
from silotune.methods.apfl import APFL
from silotune.methods.centralized import Centralized
from silotune.methods.ditto import Ditto
from silotune.methods.fdlora import FDLoRA
from silotune.methods.fedalt import FedALT
from silotune.methods.fedap import FedAP, FedLR
from silotune.methods.fedavg import FedAvg, FedAvgFull
from silotune.methods.feddpa import FedDPAF, FedDPAT
from silotune.methods.feddyn import FedDyn
from silotune.methods.fedex_lora import FedExLoRA
from silotune.methods.fedfame import FedFAME
from silotune.methods.fedit import FedIT
from silotune.methods.fedlora import FedLoRA
from silotune.methods.fedmatch import FedMatch
from silotune.methods.fedmcp import FedMCP
from silotune.methods.fedper import FedPer
from silotune.methods.fedprompt import FedPrompt
from silotune.methods.fedproto import FedProto
from silotune.methods.fedprox import FedProx
from silotune.methods.fedrep import FedRep
from silotune.methods.fedsa_lora import FedSALoRA
from silotune.methods.fedsvd import FedSVD
from silotune.methods.ffa_lora import FFALoRA
from silotune.methods.flexlora import FlexLoRA
from silotune.methods.flora import FLoRA
from silotune.methods.hetlora import HetLoRA
from silotune.methods.local import Local
from silotune.methods.lora_fair import LoRAFAIR
from silotune.methods.moon import MOON
from silotune.methods.pfedme import PFedMe
from silotune.methods.rolora import RoLoRA
from silotune.methods.scaffold import SCAFFOLD
from silotune.methods.server_only import ServerOnly

BUILT_IN: tuple[type[Method], ...] = (
    *(Local, Centralized, ServerOnly, FedAvg, FedAvgFull, FedProx, SCAFFOLD, FedDyn),
    *(FedAP, FedLR, MOON, FedRep, FedPer, FedMatch, Ditto, APFL, PFedMe, FedMCP, FedFAME, FedProto, FedPrompt),
    *(FedIT, FedLoRA, FedDPAF, FedDPAT),
    *(FFALoRA, FedSALoRA, RoLoRA, FlexLoRA, HetLoRA, FedSVD, FedExLoRA, FLoRA, LoRAFAIR, FDLoRA, FedALT),
)
