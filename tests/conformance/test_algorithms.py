"""The built-in algorithms keep the promises of algorithms; tests/plugins has golden vectors for each."""

from __future__ import annotations

from stretto.testing import AlgorithmConformance


class TestGrpo(AlgorithmConformance):
    use = "grpo"
    options = {"group_size": 4, "minibatches": 2, "epochs": 2, "kl": {"coef": 0.01}}


class TestGrpoBySequence(AlgorithmConformance):
    use = "grpo"
    options = {"group_size": 4, "loss_mean": "sequence", "correction": {"use": "sequence_mask"}}


class TestGrpoBySum(AlgorithmConformance):
    use = "grpo"
    options = {
        "group_size": 4,
        "loss_mean": "sequence_sum",
        "minibatches": 2,
        "correction": {"use": "sequence_tis"},
        "kl": {"coef": 0.01, "where": "reward"},
    }


class TestDapo(AlgorithmConformance):
    use = "dapo"
    options = {"group_size": 4}


class TestGspo(TestDapo):
    use = "gspo"


class TestCispo(TestDapo):
    use = "cispo"


class TestSapo(TestDapo):
    use = "sapo"


class TestM2po(TestDapo):
    use = "m2po"


class TestRloo(TestDapo):
    use = "rloo"


class TestReinforcePp(TestDapo):
    use = "reinforce_pp"


class TestPpo(AlgorithmConformance):
    use = "ppo"
    options = {"group_size": 4, "kl": {"coef": 0.01, "target": 1.0, "where": "reward"}}


class TestDistill(TestDapo):
    use = "distill"


class TestSft(AlgorithmConformance):
    use = "sft"


class TestDpo(AlgorithmConformance):
    use = "dpo"


class TestIpo(TestDpo):
    options = {"variant": "ipo"}


class TestRewardModel(AlgorithmConformance):
    use = "reward_model"


class TestCentredRewardModel(TestRewardModel):
    options = {"margin": 0.3, "centering": 0.1}
