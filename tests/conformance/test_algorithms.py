"""The built-in algorithms keep the promises of algorithms; tests/plugins has golden vectors for each."""

from typing import Any

from stretto.testing import AlgorithmConformance


def kit_of(use: str, **options: Any) -> type[AlgorithmConformance]:
    return type(use, (AlgorithmConformance,), {"use": use, "options": options})


TestCispo = kit_of("cispo", group_size=4)
TestDapo = kit_of("dapo", group_size=4)
TestDistill = kit_of("distill", group_size=4)
TestDpo = kit_of("dpo")
TestGrpo = kit_of("grpo", group_size=4, minibatches=2, epochs=2, kl={"coef": 0.01})
TestGrpoBySequence = kit_of("grpo", group_size=4, loss_mean="sequence", correction={"use": "sequence_mask"})
TestGrpoBySum = kit_of(
    "grpo",
    group_size=4,
    loss_mean="sequence_sum",
    minibatches=2,
    correction={"use": "sequence_tis"},
    kl={"coef": 0.01, "where": "reward"},
)
TestGspo = kit_of("gspo", group_size=4)
TestIpo = kit_of("dpo", variant="ipo")
TestM2po = kit_of("m2po", group_size=4)
TestPpo = kit_of("ppo", group_size=4, kl={"coef": 0.01, "target": 1.0, "where": "reward"})
TestReinforcePp = kit_of("reinforce_pp", group_size=4)
TestRewardModel = kit_of("reward_model")
TestRewardModelCentred = kit_of("reward_model", margin=0.3, centering=0.1)
TestRloo = kit_of("rloo", group_size=4)
TestSapo = kit_of("sapo", group_size=4)
TestSft = kit_of("sft")
