package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"plimsoll/ledger"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
)

// torchPart is the part of all parameters of a file of torch.save.
const torchPart = "torch"

var torchKind = kind{
	"optimizer state", `write it with torch.save({"state": ..., "param_groups": ..., "names": ..., "master": ...}, FILE), ` +
		`as docs/checkpoints.md says`,
}

// OpenTorch opens a file that [Checkpoint.WriteTorch], or a program with torch.save,
// has written. The result is a checkpoint of one rank that can be converted. OpenTorch
// reads every number and verifies the archive's own checksums.
func OpenTorch(ctx context.Context, path string, progress func(bytes int64)) (*Checkpoint, error) {
	var c *Checkpoint
	err := withArchive(ctx, path, torchKind, quantizedClass, progress, func(a *archive, document any) (err error) {
		t := &torchFile{archive: a}
		if err := t.understand(document); err != nil {
			return err
		}
		if c, err = assembleForeign(path, torchPart, []*foreign{&t.foreign}); err == nil {
			c.quantized = t.quantized
		}
		return err
	})
	return c, err
}

// torchFile is a file of torch.save, with the state of all parameters.
type torchFile struct {
	*archive
	foreign
	quantized string // the class of quantized moments
}

// understand finds the parameters and their tensors in the document.
func (t *torchFile) understand(document any) error {
	groups, err := groupsOf(member(document, "param_groups"))
	if err != nil {
		return err
	}
	states, masters := byKey[int64](member(document, "state")), byKey[string](member(document, "master"))
	names := items(member(document, "names"))
	if len(names) == 0 {
		return errors.New(`it has no list "names" of the parameters`)
	}
	if len(names) < len(groups) {
		return fmt.Errorf(`it has %d "names", but %d parameters in "param_groups"`, len(names), len(groups))
	}
	for i, item := range names {
		name, isName := item.(string)
		group, isIn := groups[int64(i)]
		if !isName || !isIn {
			return fmt.Errorf("parameter %d, %s, has no name or is in no parameter group", i, shown(item))
		}
		if err := t.add(name, group, masters[name], states[int64(i)]); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
	}
	return nil
}

// byKey returns the values of a dict whose keys have a type, by key.
func byKey[K comparable](of any) map[K]any {
	values := map[K]any{}
	for _, e := range entries(of) {
		if key, ok := e.key.(K); ok {
			values[key] = e.value
		}
	}
	return values
}

// groupsOf returns the parameter group of each parameter.
func groupsOf(list any) (map[int64]int, error) {
	groups := map[int64]int{}
	for group, item := range items(list) {
		for _, item := range items(member(item, "params")) {
			number, ok := item.(int64)
			if _, twice := groups[number]; !ok || twice {
				return nil, fmt.Errorf("parameter %s of parameter group %d is no number, or is listed twice",
					shown(item), group)
			}
			groups[number] = group
		}
	}
	return groups, nil
}

// algorithmOf tells from the moments in a state which algorithm it is of. It returns their names, too.
func algorithmOf(state any) (a kernel.Algorithm, moments []string, err error) {
	for _, name := range kernel.AlgorithmNames() {
		a, _ = kernel.ParseAlgorithm(name) // is one
		moments = nil
		for _, s := range (kernel.Format{Algorithm: a}).MomentStreams() {
			moments = append(moments, string(s.Component))
		}
		if !slices.ContainsFunc(moments, func(m string) bool { return member(state, m) == nil }) {
			return a, moments, nil
		}
	}
	return a, nil, errors.New(`its "state" has no moments of Adam, Lion, Adagrad or SGD`)
}

// maxStateMembers is far above the number of members that any optimizer has. All members
// are read for each parameter, and parameters may share a state in the file.
const maxStateMembers = 64

// add adds a parameter: its master weights and its optimizer state.
func (t *torchFile) add(name string, group int, master, state any) error {
	algorithm, moments, err := momentsIn(state)
	if err != nil {
		return err
	}
	weights, ok := master.(torchTensor)
	if !ok {
		return errors.New(`it has no tensor in "master"`)
	}
	p := shard.Piece{Name: name, Shape: weights.shape, Group: group}
	if p.Count, err = p.Elements(); err != nil || p.Count == 0 { // no shard has an empty piece
		return err
	}
	places, err := t.placesOf(weights, moments, state)
	if err != nil {
		return err
	}
	for _, component := range moments {
		if o, ok := member(state, component).(*object); ok {
			t.quantized = o.module + "." + o.name
		}
	}
	step, err := t.stepOf(algorithm, member(state, "step"))
	if err != nil {
		return err
	}
	return t.foreign.add(p, algorithm, step, places)
}

// momentsIn returns the algorithm that a state is of and the names of its moments. It
// refuses states that have more than these.
func momentsIn(state any) (kernel.Algorithm, []string, error) {
	algorithm, moments, err := algorithmOf(state)
	if err != nil {
		return algorithm, nil, err
	}
	if n := len(entries(state)); n > maxStateMembers {
		return algorithm, nil, fmt.Errorf(`its "state" has %d members, expected at most %d`, n, maxStateMembers)
	}
	if foreign := foreignTo(moments, state); foreign != "" {
		return algorithm, nil, fmt.Errorf(`its "state" has %s, which plimsoll's %v does not have: this is another `+
			`optimizer`, foreign, algorithm)
	}
	return algorithm, moments, nil
}

// placesOf returns where the master weights and the moments of a state begin. All have
// the shape of the master weights.
func (a *archive) placesOf(master torchTensor, moments []string, state any) ([]numbers, error) {
	at, err := a.locate(master, master.shape)
	if err != nil {
		return nil, fmt.Errorf("master: %w", err)
	}
	places := []numbers{at}
	for _, component := range moments {
		moment, err := a.momentOf(member(state, component), master.shape)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", component, err)
		}
		places = append(places, moment)
	}
	return places, nil
}

// foreignTo returns a member that a state has beside the moments, or "". It belongs to
// another optimizer and would be lost. Master weights may be in the state: Plimsoll's
// states have them, and the file also has them by name.
func foreignTo(moments []string, state any) string {
	for _, e := range entries(state) {
		name := shown(e.key)
		if key, ok := e.key.(string); ok {
			name = key
		}
		if e.value != nil && !slices.Contains(moments, name) && name != "step" && name != string(ledger.MasterWeights) {
			return name
		}
	}
	return ""
}
