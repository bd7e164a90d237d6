package foreign

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

var zeroKind = kind{
	"checkpoint of DeepSpeed's ZeRO",
	"name the folder that engine.save_checkpoint has written, of ZeRO 1, 2 or 3 with AdamW; " +
		"docs/checkpoints.md says more",
}

// zeroPart is the part of all parameters of DeepSpeed's checkpoints.
const zeroPart = "deepspeed"

var (
	optimizerFile = lazyregexp.New(`^(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt$`)
	modelFile     = lazyregexp.New(`^(?:zero_pp_rank_0+_)?mp_rank_0+_model_states\.pt$`)
	// otherFile is written by pipelines and mixtures of experts.
	otherFile = lazyregexp.New(`^(?:layer_.*|expert_.*|.*_expp_rank_.*)\.pt$`)
	// otherRank is of another rank of a tensor or pipeline parallel job.
	otherRank = lazyregexp.New(`^(?:.*_)?mp_rank_0*[1-9]\d*_(?:model|optim)_states\.pt$`)
)

// zeroState is the name of the state in a rank's file, and in it of ZeRO 3's optimizer. baseState is the latter of ZeRO
// 1 and 2.
const zeroState, baseState = "optimizer_state_dict", "base_optimizer_state"

// anyClass admits objects that DeepSpeed and its users put into checkpoints. None of them
// does anything here.
func anyClass(pickle.Class) bool { return true }

// OpenDeepSpeed opens a checkpoint of DeepSpeed: of ZeRO 1 to 3, or a universal one. path
// is its folder, or the folder that has the name of the latest one. OpenDeepSpeed reads
// every number of the optimizer and verifies the archives' own checksums.
func OpenDeepSpeed(ctx context.Context, path string, progress func(bytes int64)) (*checkpoint.Checkpoint, error) {
	path, err := latest(path)
	if err != nil {
		return nil, err
	}
	if checkpoint.Exists(filepath.Join(path, universalFolder)) {
		return openUniversal(ctx, path, progress)
	}
	return (&zero{path: path, progress: progress}).open(ctx)
}

func (z *zero) open(ctx context.Context) (*checkpoint.Checkpoint, error) {
	z.located = map[string]map[string]bool{}
	if err := z.find(); err != nil {
		return nil, err
	}
	err := z.with(ctx, z.model, func(_ *archive, document any) error { return z.readModel(document) })
	if err != nil {
		return nil, err
	}
	for rank, file := range z.files {
		err := z.with(ctx, file, func(a *archive, document any) error {
			return z.readRank(a, rank, pickle.Member(document, zeroState))
		})
		if err != nil {
			return nil, err
		}
	}
	if err := z.checkComplete(); err != nil {
		return nil, zeroKind.wrong(z.path, "%v", err)
	}
	c, err := checkpoint.AssembleForeign(z.path, zeroPart, z.ranks)
	return c, inputOf(zeroKind, z.path, err)
}

// with is withArchive for a file of the checkpoint. It notes which storages use locates.
func (z *zero) with(ctx context.Context, path string, use func(a *archive, document any) error) error {
	return withArchive(ctx, path, zeroKind, anyClass, z.progress, func(a *archive, document any) error {
		a.located = map[string]bool{}
		z.located[path] = a.located
		return use(a, document)
	})
}

// inputOf returns an error as one for a file of a kind, or the one for a file that it has.
func inputOf(k kind, path string, err error) error {
	var input *fault.Input
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &input):
		return input
	}
	return k.wrong(path, "%v", err)
}

// latestTag is the file that names the latest checkpoint.
const latestTag = "latest"

// latest returns the folder that a file in the folder names as the latest checkpoint.
func latest(path string) (string, error) {
	for _, name := range []string{"latest_universal", latestTag} {
		file, info, err := files.Open(filepath.Join(path, name))
		if err != nil {
			continue
		}
		text, err := files.ReadOpen(file, info, 4096)
		_ = file.Close()
		tag := strings.TrimSpace(string(text))
		if err != nil || !filepath.IsLocal(tag) {
			return "", zeroKind.wrong(filepath.Join(path, name), "it does not name a folder beside it")
		}
		return filepath.Join(path, tag), nil
	}
	return path, nil
}

// zero is a checkpoint of ZeRO: a file for each rank, and one for the module.
type zero struct {
	path     string
	model    string   // file of the module
	files    []string // by rank
	progress func(bytes int64)
	located  map[string]map[string]bool // keys of the storages whose numbers are read, by file

	groups []*pickle.Dict // shapes of the parameters by name, of each group (ZeRO 3: of each subgroup)
	shapes map[string][]int64
	read   map[string]int64 // elements that earlier ranks have
	ranks  []*checkpoint.ForeignShard
}

// find finds the files of all ranks. It refuses those of jobs that are not only data parallel.
func (z *zero) find() error {
	entries, err := os.ReadDir(z.path)
	if err != nil {
		return checkpoint.Cause(z.path, "expected a folder with a checkpoint of DeepSpeed", errors.Unwrap(err))
	}
	ranks := map[int]string{}
	for _, e := range entries {
		name := e.Name()
		switch m := optimizerFile.FindStringSubmatch(name); {
		case otherRank.MatchString(name):
			return zeroKind.wrong(z.path, "%s is of a tensor or pipeline parallel job, expected mp_rank_00 only", name)
		case otherFile.MatchString(name):
			return zeroKind.wrong(z.path, "%s is of a pipeline or of a mixture of experts", name)
		case modelFile.MatchString(name):
			z.model = filepath.Join(z.path, name)
		case m != nil:
			rank, _ := strconv.Atoi(m[1]) // digits
			if ranks[rank] != "" {
				return zeroKind.wrong(z.path, "%s and %s are of the same rank", filepath.Base(ranks[rank]), name)
			}
			ranks[rank] = filepath.Join(z.path, name)
		}
	}
	if len(ranks) == 0 || z.model == "" {
		return zeroKind.wrong(z.path, "it lacks zero_pp_rank_0_mp_rank_00_optim_states.pt or "+
			"mp_rank_00_model_states.pt")
	}
	for rank := range len(ranks) {
		if ranks[rank] == "" {
			return zeroKind.wrong(z.path, "the file of rank %d is missing, and those of %d ranks are here", rank,
				len(ranks))
		}
		z.files = append(z.files, ranks[rank])
	}
	return nil
}

// readModel reads the names and shapes of the parameters.
func (z *zero) readModel(document any) error {
	z.shapes, z.read = map[string][]int64{}, map[string]int64{}
	if n := pickle.Member(document, "mp_world_size"); n != nil && n != any(int64(1)) {
		return fmt.Errorf("its job has a tensor parallel size of %s, expected 1", pickle.Shown(n))
	}
	groups := pickle.Items(pickle.Member(document, "param_shapes"))
	if len(groups) == 0 {
		return errors.New(`it has no "param_shapes"`)
	}
	for _, item := range groups {
		group, _ := item.(*pickle.Dict)
		for _, e := range pickle.Entries(item) {
			name, isName := e.Key.(string)
			shape, isShape := pickle.Sizes(e.Value)
			if _, twice := z.shapes[name]; !isName || !isShape || twice {
				return fmt.Errorf(`"param_shapes" has the shape %s for %s, or has it twice`, pickle.Shown(e.Value),
					pickle.Shown(e.Key))
			}
			if _, err := (shard.Piece{Name: name, Shape: shape}).Elements(); err != nil {
				return err
			}
			z.shapes[name] = shape
		}
		z.groups = append(z.groups, group)
	}
	return nil
}

// readRank reads where a rank's parts of the parameters lie in its flat tensors.
func (z *zero) readRank(a *archive, rank int, document any) error {
	z.ranks = append(z.ranks, &checkpoint.ForeignShard{})
	stage := pickle.Member(document, "zero_stage")
	if o, ok := stage.(*pickle.Object); ok && len(o.Arguments) == 1 {
		stage = o.Arguments[0]
	}
	if err := z.checkPartitions(pickle.Member(document, "partition_count")); err != nil {
		return err
	}
	if stage == any(int64(3)) {
		return z.readRank3(a, rank, document)
	}
	optimizer := pickle.Member(document, baseState)
	masters := pickle.Items(pickle.Member(document, "single_partition_of_fp32_groups"))
	mappings := pickle.Items(pickle.Member(document, "param_slice_mappings"))
	if _, ok := optimizer.(*pickle.Dict); !ok {
		return errors.New(`it has no dict "base_optimizer_state": "elastic_checkpoint" was on, or this is another stage`)
	}
	if len(masters) == 0 || len(mappings) != len(masters) || len(z.groups) != len(masters) {
		return fmt.Errorf(`%d fp32 partitions, %d "param_slice_mappings" and %d "param_shapes", expected as many`,
			len(masters), len(mappings), len(z.groups))
	}
	for group, master := range masters {
		flat, err := flatOf(a, optimizer, group, group, master)
		if err != nil {
			return fmt.Errorf("parameter group %d: %w", group, err)
		}
		if err := z.addSlices(rank, group, flat, mappings[group]); err != nil {
			return fmt.Errorf("parameter group %d: %w", group, err)
		}
	}
	return nil
}

// checkPartitions refuses shards that fewer ranks share than there are.
func (z *zero) checkPartitions(count any) error {
	counts := pickle.Items(count)
	if counts == nil {
		counts = []any{count}
	}
	for _, n := range counts {
		if n != any(int64(len(z.files))) {
			return fmt.Errorf("its groups are divided among %s ranks, and the files of %d are here", pickle.Shown(n),
				len(z.files))
		}
	}
	return nil
}

// flat are the flat tensors of a rank: its part of all parameters of a group, one after the other.
type flat struct {
	locations []checkpoint.Location // of the master and the moments
	count     int64                 // numbers of the master
	step      int64
}

// flatOf finds the flat tensors of a group.
func flatOf(a *archive, optimizer any, number, group int, master any) (flat, error) {
	state := byKey[int64](pickle.Member(optimizer, "state"))[int64(number)]
	if groups := pickle.Items(pickle.Member(optimizer, "param_groups")); group < len(groups) {
		if err := checkMomentum(state, groups[group]); err != nil {
			return flat{}, err
		}
	}
	algorithm, moments, err := momentsIn(state)
	if err != nil {
		return flat{}, err
	}
	if algorithm != kernel.Adam {
		return flat{}, fmt.Errorf("it has the state of %v, expected AdamW with exp_avg and exp_avg_sq", algorithm)
	}
	step := pickle.Member(state, "step")
	if step == nil { // as FusedAdam has it
		if groups := pickle.Items(pickle.Member(optimizer, "param_groups")); group < len(groups) {
			step = pickle.Member(groups[group], "step")
		}
	}
	var f flat
	if f.step, err = a.stepOf(algorithm, step); err != nil {
		return flat{}, err
	}
	weights, ok := master.(pickle.Tensor)
	if !ok || len(weights.Shape) != 1 {
		return flat{}, fmt.Errorf("its fp32 partition is %s, expected a flat tensor", pickle.Shown(master))
	}
	f.count = weights.Shape[0]
	at, err := a.locate(weights, weights.Shape)
	if err != nil {
		return flat{}, fmt.Errorf("master: %w", err)
	}
	f.locations = []checkpoint.Location{at}
	for _, component := range moments {
		tensor, _ := pickle.Member(state, component).(pickle.Tensor)
		if len(tensor.Shape) != 1 || tensor.Shape[0] < f.count { // the master may lack the padding
			return flat{}, fmt.Errorf("%s has the shape %v, expected at least the %d numbers of the master", component,
				tensor.Shape, f.count)
		}
		if at, err = a.locate(tensor, tensor.Shape); err != nil {
			return flat{}, fmt.Errorf("%s: %w", component, err)
		}
		f.locations = append(f.locations, at)
	}
	return f, nil
}

// addSlices adds the slices of parameters that ZeRO 1 and 2 list for a rank and group.
// The flat tensors of all ranks, one after the other, have every parameter once.
func (z *zero) addSlices(rank, group int, f flat, mapping any) error {
	end := int64(0)
	for _, e := range pickle.Entries(mapping) {
		name, _ := e.Key.(string)
		address, _ := e.Value.(*pickle.Object)
		if address == nil {
			return fmt.Errorf("the slice of parameter %q is %s, expected a fragment_address", name,
				pickle.Shown(e.Value))
		}
		start, isStart := pickle.Member(address.State, "start").(int64)
		count, isCount := pickle.Member(address.State, "numel").(int64)
		if !isStart || !isCount || start < end || count < 0 || count > f.count-start {
			return fmt.Errorf("parameter %q has %s numbers from %s on, of %d in the partition", name,
				pickle.Shown(pickle.Member(address.State, "numel")), pickle.Shown(pickle.Member(address.State,
					"start")), f.count)
		}
		if pickle.Member(z.groups[group], name) == nil {
			return fmt.Errorf(`parameter %q is not in "param_shapes"`, name)
		}
		all, _ := shard.Piece{Shape: z.shapes[name]}.Elements() // was validated
		first := z.read[name]
		if first > 0 && start > 0 || first+count < all && start+count < f.count {
			return fmt.Errorf("parameter %q goes on from an earlier rank or to a later one, but is in the middle", name)
		}
		if err := z.add(rank, group, name, f, start, count); err != nil {
			return err
		}
		end = start + count
	}
	return nil
}

// add adds the next numbers of a parameter.
func (z *zero) add(rank, group int, name string, f flat, start, count int64) error {
	if count == 0 {
		return nil
	}
	own := shard.Range{First: z.read[name], Count: count}
	p := shard.Piece{Name: name, Shape: z.shapes[name], Group: group, Range: own}
	if err := p.Validate(); err != nil {
		return err
	}
	var at []checkpoint.Numbers
	for _, l := range f.locations {
		at = append(at, l.After(start))
	}
	z.read[name] += count
	return z.ranks[rank].Add(p, kernel.Adam, f.step, at)
}

// readRank3 is readRank for ZeRO 3: every rank has an equal part of each parameter, and
// the last ones may be padding.
func (z *zero) readRank3(a *archive, rank int, document any) error {
	optimizer, masters := pickle.Member(document, zeroState), pickle.Items(pickle.Member(document, "fp32_flat_groups"))
	groups, err := groupsOf(pickle.Member(optimizer, "param_groups"))
	if err != nil {
		return err
	}
	if len(masters) != len(z.groups) {
		return fmt.Errorf(`%d "fp32_flat_groups" and %d "param_shapes", expected as many`, len(masters), len(z.groups))
	}
	for number, master := range masters {
		group, ok := groups.numbers[int64(number)]
		if !ok {
			return fmt.Errorf("subgroup %d is in no parameter group", number)
		}
		f, err := flatOf(a, optimizer, number, group, master)
		if err != nil {
			return fmt.Errorf("subgroup %d: %w", number, err)
		}
		at := int64(0)
		for _, e := range z.groups[number].Entries {
			name, _ := e.Key.(string)
			all, _ := shard.Piece{Shape: z.shapes[name]}.Elements() // was validated
			world := int64(len(z.files))
			own := (all + world - 1) / world
			if own > f.count-at {
				return fmt.Errorf("subgroup %d has %d numbers, too few for parameter %q", number, f.count, name)
			}
			if err := z.add(rank, group, name, f, at, min(own, all-z.read[name])); err != nil {
				return err
			}
			at += own
		}
		if at != f.count {
			return fmt.Errorf("subgroup %d has %d numbers, but its parameters have %d", number, f.count, at)
		}
	}
	return nil
}

// checkComplete reports an error unless the ranks have every element of every parameter.
func (z *zero) checkComplete() error {
	for name, shape := range z.shapes {
		if all, _ := (shard.Piece{Shape: shape}).Elements(); z.read[name] != all {
			return fmt.Errorf("parameter %q of shape %v has %d elements, but the ranks have %d", name, shape, all,
				z.read[name])
		}
	}
	return nil
}
