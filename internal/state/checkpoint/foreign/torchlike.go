package foreign

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// torchLike is an optimizer as torch.save has written its state_dict: the order of its parameters, and its groups with
// their options.
type torchLike struct {
	parameters []shard.Piece
	keys       []any  // of the parameters in the state
	stepless   []bool // parameters whose group counts the steps
	groups     []any
}

// WriteTorchLike is WriteTorch for an optimizer whose state_dict is in the file like: trainers load the file in place
// of it. Parameters have its order, and groups its options. names is a file with the names of its parameters, where
// like has none.
func WriteTorchLike(
	ctx context.Context, c *checkpoint.Checkpoint, path, like, names string, progress func(bytes int64),
) error {
	list, err := readNames(names)
	if err != nil {
		return err
	}
	var l *torchLike
	err = withArchive(ctx, like, torchKind, quantizedClass, nil, func(a *archive, document any) (err error) {
		l, err = likeOf(c, like, document, list)
		return err
	})
	if err != nil {
		return err
	}
	return writeTorch(ctx, c, path, l, progress)
}

// likeOf finds the checkpoint's parameters in the state_dict of an optimizer. Both have the same ones.
func likeOf(c *checkpoint.Checkpoint, like string, document any, names []string) (*torchLike, error) {
	all, err := parametersOf(document, names)
	if err != nil {
		return nil, err
	}
	l := &torchLike{groups: pickle.Items(pickle.Member(document, "param_groups"))}
	isIn := func(name string) bool {
		return slices.ContainsFunc(all, func(p torchParameter) bool { return p.name == name })
	}
	taken, states := map[string]bool{}, stateByKey(pickle.Member(document, "state"))
	for _, p := range all {
		own, ok := c.Piece(p.name)
		if !ok {
			return nil, c.Absent(like, p.name, isIn)
		}
		taken[p.name] = true
		if err := checkLike(c, own, states[p.key]); err != nil {
			return nil, fmt.Errorf("parameter %q: %w", p.name, err)
		}
		l.parameters, l.keys = append(l.parameters, own), append(l.keys, p.key)
		state := states[p.key]
		l.stepless = append(l.stepless, state != nil && pickle.Member(state, "step") == nil)
	}
	for _, own := range c.Pieces() {
		if !taken[own.Name] {
			return nil, fault.File(c.Path()).Inputf("parameter %q is not in the optimizer that shall load it", own.Name)
		}
	}
	left := maxOptions
	counts := func(group any) bool { return pickle.Member(group, "step") != nil }
	if slices.ContainsFunc(l.groups, counts) || slices.Contains(l.stepless, true) && c.Algorithm() == kernel.Adam {
		if err := c.OneStep("an optimizer that counts the steps of a parameter group"); err != nil {
			return nil, err
		}
	}
	for number, group := range l.groups {
		if err := checkOptions(group, &left); err != nil {
			return nil, fmt.Errorf("parameter group %d: %w", number, err)
		}
	}
	return l, nil
}

// checkLike refuses the state of another algorithm, of another shape, or in another format. There is none before the
// first step.
func checkLike(c *checkpoint.Checkpoint, own shard.Piece, state any) error {
	if state == nil {
		return nil
	}
	algorithm, moments, err := momentsIn(state)
	if err != nil {
		return err
	}
	if algorithm != c.Algorithm() {
		return fmt.Errorf("it has the state of %v, and the checkpoint that of %v", algorithm, c.Algorithm())
	}
	for _, component := range moments {
		tensor, ok := pickle.Member(state, component).(pickle.Tensor)
		if !ok {
			return fmt.Errorf("%s is %s, expected a tensor", component, pickle.Shown(pickle.Member(state, component)))
		}
		if fmt.Sprint(tensor.Shape) != fmt.Sprint(own.Shape) {
			return fmt.Errorf("%s has the shape %v, and in the checkpoint %v", component, tensor.Shape, own.Shape)
		}
	}
	return nil
}

// Bounds of the options of an optimizer, far above what any has.
const (
	maxOptions = 1 << 16 // objects, without the parameters
	maxOption  = 1 << 12 // bytes of a text
)

// checkOptions refuses options that cannot be written again.
func checkOptions(group any, left *int) error {
	if pickle.Member(group, muonOptions[0]) != nil || pickle.Member(group, muonOptions[1]) == true {
		return errMuon
	}
	for _, e := range pickle.Entries(group) {
		name, ok := e.Key.(string)
		switch {
		case !ok:
			return fmt.Errorf("an option has the name %s", pickle.Shown(e.Key))
		case name == "params": // were checked
			continue
		case name == "param_names":
			if _, err := namesOf(pickle.Items(e.Value)); err != nil {
				return err
			}
			continue
		}
		if err := checkPlain(name, left); err != nil {
			return err
		}
		if err := checkPlain(e.Value, left); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	return nil
}

// checkPlain refuses what pickler.value does not write. A list may be in itself, so objects are counted.
func checkPlain(x any, left *int) error {
	if *left--; *left < 0 {
		return fmt.Errorf("its options have more than %d objects", maxOptions)
	}
	var parts []any
	switch x := x.(type) {
	case nil, bool, int64, float64:
	case string:
		if len(x) > maxOption {
			return fmt.Errorf("a text has %d bytes, expected at most %d", len(x), maxOption)
		}
	case pickle.Tuple:
		parts = x
	case *pickle.List:
		parts = x.Items
	case *pickle.Dict:
		for _, e := range x.Entries {
			if e.Key == nil {
				return errors.New("a key that is no number and no text")
			}
			parts = append(parts, e.Key, e.Value)
		}
	default:
		return fmt.Errorf("it is %s, expected a number or a text: a learning rate in a tensor is not written",
			pickle.Shown(x))
	}
	for _, part := range parts {
		if err := checkPlain(part, left); err != nil {
			return err
		}
	}
	return nil
}

// writeGroups writes the parameter groups. A step that a group counts, as FusedAdam's, is the checkpoint's.
func (l *torchLike) writeGroups(p *pickle.Writer, step int64) {
	for _, group := range l.groups {
		p.Dict(func() {
			for _, e := range pickle.Entries(group) {
				p.Value(e.Key)
				if e.Key == any("step") {
					p.Int(step)
				} else {
					p.Value(e.Value)
				}
			}
		})
	}
}
