"""The built-in algorithms keep the promises of algorithms; tests/plugins has golden vectors for each."""

from __future__ import annotations

from stretto.testing import AlgorithmConformance


class TestGrpo(AlgorithmConformance):
    use = "grpo"
    options = {"group_size": 4, "minibatches": 2, "epochs": 2, "kl": {"coef": 0.01}}


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


class TestRewardModel(AlgorithmConformance):
    use = "reward_model"
