package job

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// ServiceOptimizer is plimsoll.torch.AdamW: the optimizer service holds the states on the host and updates them there.
// A format may follow it, as in plimsoll/int8.
const ServiceOptimizer = "plimsoll"

// ServiceFormats are the formats of the service's states, by the bytes that they take.
var ServiceFormats = []string{"fp32", "split", "bf16", "int8", "split24"}

// serviceFormats are what the names mean for bf16 parameters.
var serviceFormats = map[string]kernel.Format{
	"fp32":    {State: kernel.FP32, Moments: kernel.MomentsFP32},
	"split":   {State: kernel.Split, Moments: kernel.MomentsFP32},
	"bf16":    {State: kernel.Split, Moments: kernel.MomentsBF16},
	"int8":    {State: kernel.Split, Moments: kernel.MomentsInt8},
	"split24": {State: kernel.Split24, Moments: kernel.MomentsInt8},
}

// serviceFormat returns the format of a name for parameters of a type. Only bf16 parameters are halves of their master
// weights.
func serviceFormat(name string, stored dtype.Type) (*kernel.Format, error) {
	name = cmp.Or(name, "split")
	f, known := serviceFormats[name]
	if !known {
		return nil, fault.Inputf("--optimizer %s/%s: there is no such format", ServiceOptimizer, name).
			WithHint("expected " + fault.OneOf(ServiceFormats...))
	}
	f.Algorithm, f.Parameter, f.Gradient = kernel.Adam, stored, stored
	if stored != dtype.BF16 {
		f.State = kernel.FP32
	}
	return &f, nil
}

// inService has the optimizer service update the parameters.
func (r *resolver) inService(format string) error {
	f, err := serviceFormat(format, r.job.stored())
	if err != nil {
		return err
	}
	others := r.Request.Offload
	others.Tier, others.Tenants = Tier{}, 0
	if others != (Offload{}) {
		return fault.Inputf("--optimizer %s and --offload both say where the optimizer's states are", ServiceOptimizer).
			WithHint("leave one of them out")
	}
	s, err := Offload{Tier: r.Request.Offload.Tier, Tenants: r.Request.Offload.Tenants}.decide(r.job)
	if err != nil {
		return err
	}
	s.Rest, s.Format = InService, f
	r.job.Offload = s
	return nil
}

// Tier is the service's tier on disks.
type Tier struct {
	Disks  int          // of a node, one folder on each
	Memory ledger.Bytes // of the windows of all ranks of a node
}

// ServiceBytes returns the size of all arenas of a shard in memory, some of whose elements have fp32 moments in any
// format.
func ServiceBytes(f kernel.Format, elements, wide int64) (ledger.Bytes, error) {
	config, err := serviceShard(f, elements, wide)
	return arenaBytes(config), err
}

// LogBytes returns the size of the log with which the service can retract a step of a shard in fp32 moments.
func LogBytes(f kernel.Format, elements int64) (ledger.Bytes, error) {
	config, err := serviceShard(f, elements, 0)
	if err != nil {
		return 0, err
	}
	plain := arenaBytes(config)
	config.Retracts = true
	return arenaBytes(config) - plain, nil
}

// serviceShard returns a shard of the service, some of whose elements have fp32 moments in any format.
func serviceShard(f kernel.Format, elements, wide int64) (config engine.ShardConfig, err error) {
	f.Algorithm = kernel.Adam
	sections := append(shard.Uniform(f, elements-wide), shard.Section{Elements: wide, Moments: kernel.MomentsFP32})
	config.Layout, err = shard.NewLayout(f, shard.DefaultChunk, sections)
	return config, err
}

func arenaBytes(config engine.ShardConfig) (bytes ledger.Bytes) {
	if config.Layout == nil {
		return 0
	}
	for _, arena := range config.Arenas() {
		bytes += arena.Size
	}
	return bytes
}

// Put gives a shard of one of the ranks of a node its part of the tier, if there is one.
func (t *Tier) Put(config *engine.ShardConfig, ranks int) error {
	if t == nil {
		return nil
	}
	folders := make([]string, t.Disks)
	for i := range folders {
		folders[i] = strconv.Itoa(i) // on paper no folder has a path
	}
	config.Tier = &engine.Tier{Folders: folders}
	each := t.Memory / ledger.Bytes(ranks)
	if config.Tier.Window = config.FirstWindow(each); config.Tier.Lanes == 0 {
		return fault.Inputf("--memory %v is too little: the window of each of %s takes at least %v", t.Memory,
			ledger.Plural(ranks, "rank"), config.LeastWindow()).
			WithHint(fmt.Sprintf("--memory %dMiB", 1+config.LeastWindow()*ledger.Bytes(ranks)/ledger.MiB))
	}
	return nil
}

// WideMoments returns the number of trained parameters that keep fp32 moments beside moments in int8, as rehearse and
// the client have them. An adapter's matrices keep none.
func (j *Job) WideMoments(trained int64) int64 {
	if j.Adapter != nil {
		return 0
	}
	var wide int64
	for _, p := range j.Model.Parameters {
		if p.TiedTo == "" && !p.Frozen && (p.IsSmall() || p.IsEmbedding()) {
			wide += p.Elements()
		}
	}
	return min(wide, trained)
}

// ServiceBytes returns what the service holds for a rank with so many trained parameters.
func (o *StateOffload) ServiceBytes(j *Job, elements int64) (ledger.Bytes, error) {
	if o.Format == nil {
		return o.Service, nil
	}
	config, err := o.shard(j, elements)
	return arenaBytes(config) * ledger.Bytes(o.Tenants), err
}

// TierBytes returns what the tier of a rank with so many trained parameters takes and moves.
func (o *StateOffload) TierBytes(j *Job, elements int64) (engine.TierBytes, error) {
	config, err := o.shard(j, elements)
	if err != nil {
		return engine.TierBytes{}, err
	}
	return config.TierBytes(), nil
}

// shard returns the shard that the service holds for a rank.
func (o *StateOffload) shard(j *Job, elements int64) (engine.ShardConfig, error) {
	var wide int64
	if o.Format.Moments == kernel.MomentsInt8 {
		wide = min(elements, (j.WideMoments(elements*int64(j.holders()))+int64(j.holders())-1)/int64(j.holders()))
	}
	config, err := serviceShard(*o.Format, elements, wide)
	if err != nil {
		return config, err
	}
	return config, o.Tier.Put(&config, j.RanksPerNode)
}

// holders returns the number of ranks that hold a shard each of the trained parameters.
func (j *Job) holders() int {
	if j.FSDP == nil {
		return 1
	}
	return max(1, j.World/int(j.Stages()))
}

// formatName names the format of the service.
func (o *StateOffload) formatName() string {
	for name, f := range serviceFormats {
		if o.Format != nil && f.State == o.Format.State && f.Moments == o.Format.Moments {
			return name
		}
	}
	return slices.Min(ServiceFormats)
}
