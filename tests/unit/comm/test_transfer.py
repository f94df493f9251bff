"""What a newcomer does with the State that it is given, where that does not go well."""

import pytest
import torch

from elastix.comm.network import transfer
from elastix.comm.protocol.participant import OutOfMemory


def too_much():
    return torch.empty(1 << 60, dtype=torch.uint8)


def python_too():
    raise MemoryError


def on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("allocate", [too_much, python_too, on_a_gpu])
def test_no_memory_is_the_newcomers_own_trouble(allocate):
    with pytest.raises(OutOfMemory, match="no memory for the State"), transfer.taking():
        allocate()


def test_what_else_goes_wrong_is_passed_on():
    with pytest.raises(RuntimeError, match="shapes differ"), transfer.taking():
        raise RuntimeError("shapes differ")


def test_user_code_cannot_take_it_for_an_error_of_its_own():
    assert not issubclass(OutOfMemory, Exception)
