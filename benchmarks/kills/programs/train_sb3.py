"""stable-baselines3's PPO with CheckpointCallback, and learn(reset_num_timesteps=False)."""

# /// script
# dependencies = ["stable-baselines3"]
# ///

import reports
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback

STEPS = 2048


class _Reports(BaseCallback):
    def _on_step(self):
        if self.num_timesteps % 16 == 0:
            reports.step(self.num_timesteps)
        return True


found = sorted(reports.CHECKPOINTS.glob("ppo_*_steps.zip"), key=lambda p: int(p.stem.split("_")[1]))
if found:
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO.load(found[-1], env=make_vec_env("CartPole-v1", seed=0), device="cpu")
else:
    model = PPO("MlpPolicy", "CartPole-v1", seed=0, n_steps=128, n_epochs=1, device="cpu")
saves = CheckpointCallback(256, str(reports.CHECKPOINTS), name_prefix="ppo")
left = STEPS - model.num_timesteps
model.learn(left, callback=[saves, _Reports()], reset_num_timesteps=not found)
reports.final(model.policy.state_dict())
