package plan

import (
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// widenByRelease makes room on a node for what an earlier release of the program has on the host while the engine is
// awake.
func (p *Plan) widenByRelease(node *ledger.Device, c simulate.RankClass) {
	if c.Earlier == 0 {
		return
	}
	with, more := *node, c.Earlier*ledger.Bytes(c.RanksPerNode)
	with.Phases = slices.Clone(node.Phases)
	for i := range with.Phases {
		if of := &with.Phases[i]; slices.Contains(awake, of.Name) {
			of.PeakUsed += more
			of.PeakReserved += more
			of.PeakAllocated += more
		}
	}
	raise(node, p.Spread.Used(&with, with.Peak().PeakUsed, with.Phases).Upper, "earlier releases", "before May 2026 "+
		"slime moved parameters and gradients to the host while SGLang generates: --rollout release=current rules "+
		"that out")
}

// awake are the phases in which an engine is awake.
var awake = []ledger.PhaseName{ledger.WeightSync, ledger.Wake, ledger.Rollout}

// raise sets the upper end of a device's interval to a figure that is higher.
func raise(d *ledger.Device, upper ledger.Bytes, name, reason string) {
	if i := d.Interval; upper > i.Upper {
		d.Interval = intervalOf(i.Lower, upper, append(slices.Clone(i.Sources), ledger.Source{Name: name,
			Above: upper - d.Peak().PeakUsed, Reason: reason}))
	}
}

// widenBySamples makes room on GPUs for the longest sample that the engine can make, where nothing else bounds samples.
func (p *Plan) widenBySamples(j *job.Job) error {
	longest := j.LongestSample()
	if longest <= j.Sequence {
		return nil
	}
	planned, err := withOperations(j.OfSample(longest))
	if err != nil {
		return err
	}
	for i := range planned.Devices {
		if d := &p.Devices[i]; d.Kind == ledger.GPU {
			raise(d, planned.Devices[i].Interval.Upper, "samples of any length", "code of the user makes samples of "+
				"several turns, which may be as long as the engine's context: --rollout-max-context-len bounds them")
		}
	}
	p.judge()
	return nil
}
