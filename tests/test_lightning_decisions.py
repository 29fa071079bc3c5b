"""C86: decisions follow one number, not a rank's own: a schedule that watches a metric, and the best checkpoint."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

import strategies
from support.lightning_modules import Plain
from support.lightning_runs import launched, loader, trainer
from support.ranks import run_ranks

# Each rank's own validation loss, epoch by epoch. Alone, rank 0 sees no improvement after the first; the mean falls.
OWN = ([0.12, 0.13, 0.14, 0.15], [0.23, 0.13, 0.05, 0.01])


class Unsynced(Plain):
    """Logs a number of the rank's own; the schedule watches it."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", OWN[self.rank][self.current_epoch])

    def configure_optimizers(self):
        optimizer = self.optimizer()
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def fit(rank, folder, stage, ranks):
    torch.manual_seed(0)
    rates = []

    class Note(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    with launched(rank, ranks):
        best = ModelCheckpoint(folder, filename="{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2)
        module = Unsynced(rank)
        one = trainer(strategies.ZeroStrategy(stage=stage), ranks, max_epochs=4, enable_checkpointing=True,
                      num_sanity_val_steps=0, callbacks=[best, EarlyStopping("val_loss", patience=3), Note()])
        one.fit(module, loader(ranks, rank), loader(ranks, rank))
        scheduler = one.lr_scheduler_configs[0].scheduler
        return (rates, one.global_step, one.strategy.lightning_module_state_dict(),
                isinstance(scheduler, ReduceLROnPlateau), sorted(scheduler.state_dict()), scheduler.best)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_their_own_metric_take_the_same_decisions(tmp_path, stage):
    first, second = run_ranks(2, fit, str(tmp_path), stage, 2)
    assert first[0] == second[0] == [pytest.approx(1e-2)] * 4, "the mean falls at every epoch"
    assert first[5] == second[5] == pytest.approx(0.08)
    assert first[1] == second[1]
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    assert first[3] is True
    plain = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0)).state_dict()
    assert first[4] == sorted(plain), "what is saved is what plain torch saves"
