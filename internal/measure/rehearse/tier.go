//go:build linux

package rehearse

import (
	"fmt"
	"runtime"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/tier"
)

// TierRequest is a tier on disks as a user asks for it. Without folders all of the state is in memory.
type TierRequest struct {
	Folders []string
	Memory  ledger.Bytes // of the windows of all ranks
}

// resolve returns the tier that was asked for, or nil for none.
func (r TierRequest) resolve(pace PaceRequest) (*TierRequest, error) {
	switch {
	case len(r.Folders) == 0:
		return nil, nil
	case pace.Mode != "":
		return nil, fault.Inputf("--tier is given, and --overlap %s: a rehearsal with a trainer has all in memory",
			pace.Mode).WithHint("leave one of the two out")
	}
	folders, err := tier.Folders(r.Folders)
	if err != nil {
		return nil, err
	}
	r.Folders = folders
	return &r, nil
}

// putOnTier gives the shard of a rank its files, which are gone with the rehearsal, and its share of the window.
func (j *Job) putOnTier(config *engine.ShardConfig) error {
	if j.Tier == nil {
		return nil
	}
	config.Tier = &engine.Tier{Disk: tier.HostDisk{}, Folders: j.Tier.Folders,
		Name: fmt.Sprintf("rehearsal-rank%05d", config.Rank), Scratch: true}
	window := j.Tier.Memory / ledger.Bytes(j.Ranks)
	if config.Tier.Window = config.WindowWithin(window); config.Tier.Lanes == 0 {
		return fault.Inputf("--memory %v is too little: the window of each of %s takes at least %v", j.Tier.Memory,
			ledger.Plural(j.Ranks, "rank"), config.LeastWindow()).
			WithHint(fmt.Sprintf("--memory %dMiB", 1+config.LeastWindow()*ledger.Bytes(j.Ranks)/ledger.MiB))
	}
	return nil
}

// tierPlans returns the files of all ranks; none without a tier.
func (p *Placement) tierPlans() (plans []tier.Plan) {
	for _, config := range p.Shards {
		if config.Tier != nil {
			plans = append(plans, config.TierPlan())
		}
	}
	return plans
}

// TierBytes adds up the tiers of all ranks.
func (p *Placement) TierBytes() (sum engine.TierBytes) {
	for _, config := range p.Shards {
		if config.Tier == nil {
			continue
		}
		b := config.TierBytes()
		sum.Window, sum.Files, sum.Lanes = sum.Window+b.Window, sum.Files+b.Files, b.Lanes
		sum.StepReads, sum.StepWrites = sum.StepReads+b.StepReads, sum.StepWrites+b.StepWrites
		sum.Kept += b.Kept
	}
	return sum
}

// runLanes lets Go run as many threads at a time as the lanes need, until the function that it returns is called.
func (p *Placement) runLanes() (end func()) {
	before := runtime.GOMAXPROCS(0)
	lanes := 0
	for _, config := range p.Shards {
		lanes += config.LaneProcessors()
	}
	runtime.GOMAXPROCS(before + lanes)
	return func() { runtime.GOMAXPROCS(before) }
}

// LockTier locks the folders of the tier, and checks that the files fit, before the first byte is taken. The caller
// calls release in the end.
func (p *Placement) LockTier() (release func(), err error) {
	if p.Tier == nil {
		return func() {}, nil
	}
	if release, err = tier.Lock(p.Tier.Folders); err != nil {
		return nil, &fault.Input{What: "--tier", Err: err}
	}
	if err := tier.CheckRoom(tier.HostDisk{}, p.tierPlans()...); err != nil {
		release()
		return nil, err
	}
	return release, nil
}
