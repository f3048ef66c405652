import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """Nothing that was compiled before is used, and nothing that the test compiles afterwards; seeded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
