package foreign

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/shard"
)

// modelFiles are the files of the module: one, or with ZeRO 3 one of each rank.
var modelFiles = lazyregexp.New(`^(?:zero_pp_rank_\d+_)?mp_rank_0+_model_states\.pt$`)

// WriteDeepSpeed writes the checkpoint as one of DeepSpeed's ZeRO 1 to 3, which load_checkpoint reads on as many ranks
// as have saved like. It is a folder in the directory, and a file there names it. like is a checkpoint of the job that
// shall load it: all but weights, moments and the optimizer's step are taken from there. Memory does not grow with the
// state.
func WriteDeepSpeed(ctx context.Context, c *checkpoint.Checkpoint, directory, like string,
	progress func(bytes int64)) error {
	like, err := latest(like)
	if err == nil {
		like, err = filepath.Abs(like)
	}
	if err != nil {
		return err
	}
	if checkpoint.Exists(filepath.Join(like, universalFolder)) {
		return zeroKind.wrong(like, "it is a universal checkpoint, which --to deepspeed writes without --like")
	}
	z := &zero{path: like}
	template, err := z.open(ctx)
	if err == nil {
		err = cmp.Or(c.OneStep("DeepSpeed"), checkTemplate(c, template, "DeepSpeed"))
	}
	var weights []parameterPlace
	if err == nil {
		weights, err = z.readWeights(ctx)
	}
	if err != nil {
		return inputOf(zeroKind, like, err)
	}
	tag := filepath.Base(like)
	err = writeFolder(filepath.Join(directory, tag), func(folder string) error {
		return fillZero(ctx, c, z, weights, template.Step(), folder, progress)
	})
	if err != nil {
		return err
	}
	if err := files.Replace(filepath.Join(directory, latestTag), []byte(tag)); err != nil {
		return err
	}
	return files.SyncFolder(directory)
}

// fillZero copies DeepSpeed's files to a folder and writes the state into the copy. It reads the result as any other
// checkpoint before it is given its name.
func fillZero(
	ctx context.Context, c *checkpoint.Checkpoint, z *zero, weights []parameterPlace, step int64, folder string,
	progress func(bytes int64),
) error {
	if err := copyFolder(ctx, folder, z.path); err != nil {
		return err
	}
	out := &overwriter{folder: folder, kind: zeroKind, open: map[string]*os.File{}}
	defer out.close()
	if err := refill(ctx, c, out, z.ranks, weights, progress); err != nil {
		return err
	}
	for path, keys := range z.located {
		if err := out.sumAgain(path, keys); err != nil {
			return err
		}
	}
	if err := out.finish(); err != nil {
		return err
	}
	for _, file := range z.files {
		if c.Step() == step {
			break
		}
		if err := out.setSteps(file, zeroSteps, step, c.Step()); err != nil {
			return err
		}
	}
	written, err := (&zero{path: folder}).open(ctx)
	if err == nil && written.Step() != c.Step() {
		err = fmt.Errorf("its step is %d after it has been set to %d", written.Step(), c.Step())
	}
	return err
}

// zeroSteps returns the steps in a rank's file: of its flat tensors, and with some optimizers of the groups.
func zeroSteps(document any) []any {
	var steps []any
	state := pickle.Member(document, zeroState)
	for _, name := range []string{baseState, zeroState} {
		optimizer := pickle.Member(state, name)
		for _, e := range pickle.Entries(pickle.Member(optimizer, "state")) {
			if step := pickle.Member(e.Value, "step"); step != nil {
				steps = append(steps, step)
			}
		}
		steps = append(steps, stepsOf(optimizer)...)
	}
	return steps
}

// readWeights finds the parameters themselves in the files of the module. ZeRO 3 has none there: DeepSpeed makes them
// of the master weights.
func (z *zero) readWeights(ctx context.Context) ([]parameterPlace, error) {
	entries, err := os.ReadDir(z.path)
	if err != nil {
		return nil, err
	}
	var all []parameterPlace
	for _, e := range entries {
		if !modelFiles.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(z.path, e.Name())
		err := z.with(ctx, path, func(a *archive, document any) error {
			for name, shape := range z.shapes {
				w, err := weightIn(a, name, shape, pickle.Member(pickle.Member(document, "module"), name))
				if err != nil {
					return fmt.Errorf("parameter %q: %w", name, err)
				}
				if w != nil {
					all = append(all, *w)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// weightIn returns where a parameter is in the module, or nil if it is empty there.
func weightIn(a *archive, name string, shape []int64, of any) (*parameterPlace, error) {
	tensor, ok := of.(pickle.Tensor)
	switch {
	case !ok:
		return nil, fmt.Errorf(`it is %s in "module", expected a tensor`, pickle.Shown(of))
	case slices.Contains(tensor.Shape, 0):
		return nil, nil
	}
	stored, ok := storedTypes[tensor.Kind]
	if !ok {
		return nil, fmt.Errorf(`a tensor with a %s in "module", expected fp32, bf16 or fp16`, tensor.Kind)
	}
	at, err := a.locateBytes(tensor, shape, stored.Size())
	if err != nil {
		return nil, err
	}
	p := shard.Piece{Name: name, Shape: shape}
	p.Count, _ = p.Elements() // was validated
	g, err := newGrid(shape, []*block{{
		offsets: make([]int64,
			len(shape)), sizes: shape, starts: []int64{0}, places: []checkpoint.Location{at}, end: p.Count,
	}})
	g.of = stored
	return &parameterPlace{p, g}, err
}

// storedTypes are the types that a parameter may have beside its master weights.
var storedTypes = map[string]dtype.Type{
	"FloatStorage": dtype.F32, "BFloat16Storage": dtype.BF16, "HalfStorage": dtype.F16,
}
