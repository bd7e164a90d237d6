package simulate

import "plimsoll/ledger"

// loadReference loads the frozen model that the trained one is compared with. TRL shards it with ZeRO-3 and with FSDP,
// and otherwise every rank has all of it (prepare_deepspeed and prepare_fsdp in trl/models/utils.py). Its forward pass
// keeps nothing and ends before that of the trained model.
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
