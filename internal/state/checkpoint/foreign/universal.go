package foreign

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// A universal checkpoint of DeepSpeed has a folder for each parameter, in the folder
// "zero", with its fp32 weights and its moments.
const (
	universalFolder = "zero"
	paramMember     = "param"
)

// universalStreams are the files of a parameter: of the master and the moments.
var universalStreams = []string{"fp32", "exp_avg", "exp_avg_sq"}

var universalKind = kind{
	"universal checkpoint of DeepSpeed",
	"make it with deepspeed.checkpoint.ds_to_universal; docs/checkpoints.md says more",
}

// openUniversal opens a universal checkpoint. The module's file says which parameters
// there are, in which groups and of which shapes.
func openUniversal(ctx context.Context, path string, progress func(bytes int64)) (*checkpoint.Checkpoint, error) {
	z := &zero{path: path}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, checkpoint.Cause(path, "", errors.Unwrap(err))
	}
	for _, e := range entries {
		if otherRank.MatchString(e.Name()) || otherFile.MatchString(e.Name()) {
			return nil, universalKind.wrong(path, "%s is of a tensor or pipeline parallel job, or of a mixture of "+
				"experts", e.Name())
		}
		if modelFile.MatchString(e.Name()) {
			z.model = filepath.Join(path, e.Name())
		}
	}
	if z.model == "" {
		return nil, universalKind.wrong(path, "it lacks mp_rank_00_model_states.pt, which has the shapes of the "+
			"parameters")
	}
	var groups map[int64]int // of the lists of shapes, which ZeRO 3 has for each subgroup
	err = withArchive(ctx, z.model, universalKind, anyClass, nil, func(_ *archive, document any) error {
		return z.readModel(document)
	})
	global := int64(-1)
	if err == nil {
		file := filepath.Join(path, universalFolder, "optimizer_state.pt")
		err = withArchive(ctx, file, universalKind, anyClass, nil, func(a *archive, document any) (err error) {
			groups, global, err = universalGroups(a, document)
			return err
		})
	}
	all := &checkpoint.ForeignShard{}
	for number, group := range z.groups {
		if err == nil {
			err = readUniversal(ctx, z, all, group, groups[int64(number)], global, progress)
		}
	}
	var c *checkpoint.Checkpoint
	if err == nil {
		c, err = checkpoint.AssembleForeign(path, zeroPart, []*checkpoint.ForeignShard{all})
	}
	return c, inputOf(universalKind, path, err)
}

// universalGroups returns the parameter group of each list of shapes, and the step of
// ZeRO 3, whose parameters have none of their own, or -1.
func universalGroups(a *archive, document any) (map[int64]int, int64, error) {
	groups, err := groupsOf(pickle.Member(document, "param_groups"))
	if err != nil {
		return nil, 0, err
	}
	states := byKey[int64](pickle.Member(pickle.Member(document, "optimizer_state_dict"), "state"))
	if len(states) == 0 {
		return groups.numbers, -1, nil
	}
	step, err := a.stepOf(kernel.Adam, pickle.Member(states[0], "step"))
	return groups.numbers, step, err
}

// readUniversal adds the parameters of a group.
func readUniversal(
	ctx context.Context, z *zero, all *checkpoint.ForeignShard, names *pickle.Dict, group int, step int64,
	progress func(bytes int64),
) error {
	for _, e := range names.Entries {
		name := e.Key.(string) // was checked
		p := shard.Piece{Name: name, Shape: z.shapes[name], Group: group}
		p.Count, _ = p.Elements() // was validated
		if p.Count == 0 {
			continue
		}
		if filepath.Base(name) != name || name == ".." || name == "." {
			return fmt.Errorf("parameter %q has no folder of its name", name)
		}
		own := filepath.Join(z.path, universalFolder, name)
		if err := checkStates(own); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
		var at []checkpoint.Numbers
		for _, stream := range universalStreams {
			use := func(a *archive, document any) error {
				l, err := locateUniversal(a, document, p)
				at = append(at, l)
				return err
			}
			file := filepath.Join(own, stream+".pt")
			if err := withArchive(ctx, file, universalKind, anyClass, progress, use); err != nil {
				return err
			}
		}
		number := step
		if file := filepath.Join(own, "step.pt"); number < 0 || checkpoint.Exists(file) {
			err := withArchive(ctx, file, universalKind, anyClass, nil, func(a *archive, document any) (err error) {
				number, err = a.stepOf(kernel.Adam, document)
				return err
			})
			if err != nil {
				return err
			}
		}
		if err := all.Add(p, kernel.Adam, number, at); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
	}
	return nil
}

// checkStates refuses a parameter whose optimizer has more state than AdamW's.
func checkStates(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return checkpoint.Cause(folder, "the checkpoint is not complete", errors.Unwrap(err))
	}
	for _, e := range entries {
		switch name, ok := strings.CutSuffix(e.Name(), ".pt"); {
		case !ok || name == "fp32" || name == "exp_avg" || name == "exp_avg_sq" || name == "step":
		default:
			return fmt.Errorf("its optimizer has the state %s, which AdamW does not have", name)
		}
	}
	return nil
}

// locateUniversal returns where the numbers of a parameter are in its file. ZeRO 3 writes
// them flat.
func locateUniversal(a *archive, document any, p shard.Piece) (checkpoint.Location, error) {
	tensor, ok := document.(pickle.Tensor)
	if !ok {
		tensor, ok = pickle.Member(document, paramMember).(pickle.Tensor)
	}
	switch {
	case !ok:
		return checkpoint.Location{}, fmt.Errorf("it is %s, expected a tensor", pickle.Shown(document))
	case pickle.Member(document, "is_expert_param") == true:
		return checkpoint.Location{}, errors.New("it is of a mixture of experts")
	case len(tensor.Shape) == 1 && tensor.Shape[0] == p.Count:
		return a.locate(tensor, tensor.Shape)
	}
	return a.locate(tensor, p.Shape)
}
