package simulate

import (
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// loadReference loads the frozen model that the trained one is compared with. TRL shards it with ZeRO-3 and with FSDP,
// and otherwise every rank has all of it (prepare_deepspeed and prepare_fsdp in trl/models/utils.py).
func (s *simulation) loadReference() {
	m := s.Reference
	if m == nil {
		return
	}
	bytes := m.Elements() * s.ComputeType().Size()
	s.host.briefly(bytes, ledger.LoadStaging, whyStaged)
	ranks, device := int64(1), s.gpu
	switch {
	case s.FSDP != nil:
		ranks = s.Parallel.Shard
		if s.FSDP.OffloadParameters {
			device = s.host
		}
	case s.DeepSpeed != nil && s.DeepSpeed.ZeROStage == 3:
		ranks = s.Parallel.Shard
		if s.DeepSpeed.OffloadParameters.Device != "none" {
			device = s.host
		}
	}
	allocate(device, (bytes+ranks-1)/ranks, ledger.ReferenceModel, because("a frozen model of %s parameters x %d B, "+
		"among %d ranks", ledger.Count(m.Elements()), s.ComputeType().Size(), ranks))
}

// runReference has what the forward pass of the frozen model leaves: its logits, and their logarithms in fp32. Loss
// functions such as DPO's run it behind the trained model's forward pass, which keeps its tensors for the backward pass
// (get_batch_loss_metrics in trl/trainer/dpo_trainer.py). What its blocks have for a moment is less than that.
func (s *simulation) runReference() {
	m := s.Reference
	if m == nil || m.Network == nil {
		return
	}
	logits := s.Sequences() * s.sequence * m.Network.Head.Outputs
	s.gpu.briefly(logits*(s.ComputeType().Size()+dtype.F32.Size()), ledger.LogitsAndLoss, because("the frozen model's "+
		"logits and their logarithms in fp32: %s tokens x %s entries", ledger.Count(s.Sequences()*s.Sequence),
		ledger.Count(m.Network.Head.Outputs)))
}
