"""The training engines of one process keep the promises of training engines."""

from stretto.testing import TrainingConformance


class TestTorch(TrainingConformance):
    """Against itself with other micro-batches and padded rows."""

    use = "torch"
    options = {"micro_batch_tokens": 16, "packing": "padded"}


class TestFrozen(TrainingConformance):
    use = "frozen"
    run = {"steps": 0}
    trains = False


class TestMock(TrainingConformance):
    use = "mock"
    options = {"seconds_per_step": 0, "calls_loss": True}
