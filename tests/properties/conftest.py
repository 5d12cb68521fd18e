"""Fixtures of the tests on the fake CUDA device."""

from tests.support.device_rig import data as data
from tests.support.device_rig import device as device
from tests.support.device_rig import make as make
