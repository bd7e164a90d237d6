package foreign

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// torchPart is the part of all parameters of a file of torch.save.
const torchPart = "torch"

var torchKind = kind{
	"optimizer state", `write it with torch.save({"state": ..., "param_groups": ..., "names": ..., "master": ...}, FILE), ` +
		`as docs/checkpoints.md says`,
}

// BesideTorch is what a file of torch.save may lack. Trainers keep weights in files of their own, and give states
// numbers instead of names.
type BesideTorch struct {
	Names   string   // a JSON list of the names of the parameters, in the order of the optimizer's
	Weights []string // files with the weights, of safetensors or torch.save
}

// OpenTorch opens a file that [Checkpoint.WriteTorch], or a program with torch.save,
// has written. The result is a checkpoint of one rank that can be converted. OpenTorch
// reads every number and verifies the archive's own checksums.
func OpenTorch(
	ctx context.Context, path string, beside BesideTorch, progress func(bytes int64),
) (*checkpoint.Checkpoint, error) {
	t := &torchFile{ForeignShard: checkpoint.ForeignShard{Had: map[string]int64{}}}
	var err error
	if t.names, err = readNames(beside.Names); err != nil {
		return nil, err
	}
	if t.weights, err = readWeights(ctx, beside.Weights, progress); err != nil {
		return nil, err
	}
	var c *checkpoint.Checkpoint
	err = withArchive(ctx, path, torchKind, quantizedClass, progress, func(a *archive, document any) (err error) {
		t.archive = a
		if err := t.understand(document); err != nil {
			return err
		}
		c, err = checkpoint.AssembleForeign(path, torchPart, []*checkpoint.ForeignShard{&t.ForeignShard})
		return err
	})
	return c, err
}

// torchFile is a file of torch.save, with the state of all parameters.
type torchFile struct {
	*archive
	checkpoint.ForeignShard
	names   []string          // of all parameters, from a file of their own
	weights map[string]weight // from files of their own
	usual   any               // the state of a parameter that has one
}

// torchParameter is a parameter of an optimizer. Its key is a number or, in full states of FSDP, its name.
type torchParameter struct {
	key   any
	name  string
	group int
}

// understand finds the parameters and their tensors in the document.
func (t *torchFile) understand(document any) error {
	parameters, err := parametersOf(document, t.names)
	if err != nil {
		return err
	}
	groups := pickle.Items(pickle.Member(document, "param_groups"))
	states, masters := stateByKey(pickle.Member(document, "state")), byKey[string](pickle.Member(document, "master"))
	if t.usual, err = firstState(parameters, states, groups); err != nil {
		return err
	}
	for _, p := range parameters {
		err := checkMomentum(states[p.key], groups[p.group])
		if err != nil {
			return err
		}
		state, err := plainState(states[p.key], groups[p.group])
		if err == nil && state == nil {
			err = t.addWithoutState(p.name, p.group, masters[p.name])
		} else if err == nil {
			err = t.add(p.name, p.group, masters[p.name], state)
		}
		if err != nil {
			return fmt.Errorf("parameter %q: %w", p.name, err)
		}
	}
	return nil
}

// firstState returns the first state that a parameter has, or nil.
func firstState(parameters []torchParameter, states map[any]any, groups []any) (any, error) {
	for _, p := range parameters {
		if states[p.key] != nil {
			state, err := plainState(states[p.key], groups[p.group])
			if err != nil {
				return nil, fmt.Errorf("parameter %q: %w", p.name, err)
			}
			return state, nil
		}
	}
	return nil, nil
}

// parametersOf returns the parameters of an optimizer in the order of their keys. Names are in the document or, in the
// order of the parameters, in a list beside it.
func parametersOf(document any, names []string) ([]torchParameter, error) {
	groups, err := groupsOf(pickle.Member(document, "param_groups"))
	if err != nil {
		return nil, err
	}
	list := pickle.Items(pickle.Member(document, "names"))
	switch given := len(groups.named) > 0 || list != nil; {
	case given && names != nil:
		return nil, errors.New("it has names of its own, and names are given beside it")
	case len(groups.named) > 0:
		return groups.named, nil
	case list != nil:
		if names, err = namesOf(list); err != nil {
			return nil, err
		}
	case names == nil:
		names = groups.names
	}
	if len(names) == 0 {
		return nil, errors.New(`it has no list "names" of the parameters`)
	}
	if len(names) < len(groups.numbers) {
		return nil, fmt.Errorf(`it has %d "names", but %d parameters in "param_groups"`, len(names),
			len(groups.numbers))
	}
	parameters, seen := make([]torchParameter, len(names)), map[string]bool{}
	for i, name := range names {
		group, isIn := groups.numbers[int64(i)]
		if !isIn || seen[name] {
			return nil, fmt.Errorf("parameter %d, %q, is in no parameter group, or its name is given twice", i, name)
		}
		seen[name] = true
		parameters[i] = torchParameter{int64(i), name, group}
	}
	return parameters, nil
}

func namesOf(list []any) ([]string, error) {
	names := make([]string, len(list))
	for i, item := range list {
		name, ok := item.(string)
		if !ok {
			return nil, fmt.Errorf("parameter %d, %s, has no name", i, pickle.Shown(item))
		}
		names[i] = name
	}
	return names, nil
}

// stateByKey returns the state of each parameter, by number or name.
func stateByKey(state any) map[any]any {
	states := map[any]any{}
	for _, e := range pickle.Entries(state) {
		states[e.Key] = e.Value
	}
	return states
}

// byKey returns the values of a dict whose keys have a type, by key.
func byKey[K comparable](of any) map[K]any {
	values := map[K]any{}
	for _, e := range pickle.Entries(of) {
		if key, ok := e.Key.(K); ok {
			values[key] = e.Value
		}
	}
	return values
}

// groups are the parameter groups of an optimizer.
type groups struct {
	numbers map[int64]int    // the group of each parameter that has a number
	named   []torchParameter // parameters that have a name instead
	names   []string         // of the numbered parameters, where the optimizer was given them
}

// groupsOf returns the parameter group of each parameter.
func groupsOf(list any) (groups, error) {
	all := groups{numbers: map[int64]int{}}
	seen := map[any]bool{}
	for group, item := range pickle.Items(list) {
		own := pickle.Items(pickle.Member(item, "params"))
		for _, item := range own {
			number, isNumber := item.(int64)
			name, isName := item.(string)
			if !isNumber && !isName || seen[item] {
				return all, fmt.Errorf("parameter %s of parameter group %d is no number, or is listed twice",
					pickle.Shown(item), group)
			}
			seen[item] = true
			if isName {
				all.named = append(all.named, torchParameter{item, name, group})
			} else {
				all.numbers[number] = group
			}
		}
		names := pickle.Items(pickle.Member(item, "param_names"))
		if len(names) != len(own) {
			continue
		}
		for i, name := range names { // the optimizer numbers its parameters from 0 on
			if name, ok := name.(string); ok && own[i] == any(int64(len(all.names))) {
				all.names = append(all.names, name)
			}
		}
	}
	if len(all.named) > 0 && len(all.numbers) > 0 {
		return all, errors.New("some of its parameters have numbers, and others names")
	}
	return all, nil
}

// algorithmOf tells from the moments in a state which algorithm it is of. It returns their names, too.
func algorithmOf(state any) (a kernel.Algorithm, moments []string, err error) {
	for _, name := range kernel.AlgorithmNames() {
		a, _ = kernel.ParseAlgorithm(name) // is one
		moments = momentNames(a)
		if !slices.ContainsFunc(moments, func(m string) bool { return pickle.Member(state, m) == nil }) {
			return a, moments, nil
		}
	}
	return a, nil, errors.New(`its "state" has no moments of Adam, Lion, Adagrad or SGD`)
}

// momentNames returns the names of an algorithm's moments.
func momentNames(a kernel.Algorithm) []string {
	var names []string
	for _, s := range (kernel.Format{Algorithm: a}).MomentStreams() {
		names = append(names, string(s.Component))
	}
	return names
}

// allMoments returns the names of the moments of all algorithms.
func allMoments() map[string]bool {
	all := map[string]bool{}
	for _, name := range kernel.AlgorithmNames() {
		a, _ := kernel.ParseAlgorithm(name) // is one
		for _, moment := range momentNames(a) {
			all[moment] = true
		}
	}
	return all
}

// muonOptions are options of Muon's parameter groups, of PyTorch's and of DeepSpeed's.
var muonOptions = []string{"ns_steps", "use_muon"}

// checkMomentum refuses a momentum that has the name of SGD's and is of another optimizer.
func checkMomentum(state, group any) error {
	if pickle.Member(state, sgdMomentum) == nil {
		return nil
	}
	return checkOptionsOfSGD(func(option string) bool { return pickle.Member(group, option) != nil })
}

// sgdMomentum is the name that SGD's momentum has, and that of other optimizers.
const sgdMomentum = "momentum_buffer"

// checkOptionsOfSGD refuses options of parameter groups that are not SGD's. A file may leave all options to the
// trainer.
func checkOptionsOfSGD(has func(option string) bool) error {
	switch {
	case slices.ContainsFunc(muonOptions, has):
		return errMuon
	case has("lr") && !has("dampening"):
		return fmt.Errorf("its %s is not SGD's: its parameter groups have no option dampening", sgdMomentum)
	}
	return nil
}

var errMuon = errors.New("it is the state of Muon, whose momentum plimsoll has in checkpoints of states, and convert " +
	"neither reads nor writes these")

// maxStateMembers is far above the number of members that any optimizer has. All members
// are read for each parameter, and parameters may share a state in the file.
const maxStateMembers = 64

// pieceOf is the piece of a whole parameter.
func pieceOf(name string, group int, shape []int64) (p shard.Piece, err error) {
	p = shard.Piece{Name: name, Shape: shape, Group: group}
	p.Count, err = p.Elements()
	return p, err
}

// add adds a parameter: its master weights and its optimizer state.
func (t *torchFile) add(name string, group int, master, state any) error {
	algorithm, moments, err := momentsIn(state)
	if err != nil {
		return err
	}
	weights, err := t.weightOf(name, master)
	if err != nil {
		return err
	}
	p, err := pieceOf(name, group, weights.shape)
	if err != nil || p.Count == 0 { // no shard has an empty piece
		return err
	}
	places, err := t.placesOf(weights, moments, state)
	if err != nil {
		return err
	}
	for _, component := range moments {
		if o, ok := pickle.Member(state, component).(*pickle.Object); ok {
			t.Quantized = o.Module + "." + o.Name
		}
	}
	step, err := t.stepOf(algorithm, pickle.Member(state, "step"))
	if err != nil {
		return err
	}
	return t.ForeignShard.Add(p, algorithm, step, places)
}

// addWithoutState adds a parameter that has had no step, as it had no gradients: torch makes its state at the first
// one.
func (t *torchFile) addWithoutState(name string, group int, master any) error {
	algorithm, moments, err := momentsIn(t.usual)
	if err != nil {
		return err
	}
	weights, err := t.weightOf(name, master)
	if err != nil {
		return err
	}
	p, err := pieceOf(name, group, weights.shape)
	if err != nil || p.Count == 0 {
		return err
	}
	places := []checkpoint.Numbers{weights.at}
	for range moments {
		places = append(places, checkpoint.Zeros{})
	}
	return t.ForeignShard.Add(p, algorithm, 0, places)
}

// momentsIn returns the algorithm that a state is of and the names of its moments. It
// refuses states that have more than these.
func momentsIn(state any) (kernel.Algorithm, []string, error) {
	algorithm, moments, err := algorithmOf(state)
	if err != nil {
		return algorithm, nil, err
	}
	if n := len(pickle.Entries(state)); n > maxStateMembers {
		return algorithm, nil, fmt.Errorf(`its "state" has %d members, expected at most %d`, n, maxStateMembers)
	}
	if foreign := foreignTo(moments, state); foreign != "" {
		return algorithm, nil, fmt.Errorf(`its "state" has %s, which plimsoll's %v does not have: this is another `+
			`optimizer`, foreign, algorithm)
	}
	return algorithm, moments, nil
}

// weightOf returns the weights of a parameter, which are in the file or in one beside it.
func (t *torchFile) weightOf(name string, master any) (weight, error) {
	tensor, ok := master.(pickle.Tensor)
	if w, isBeside := t.weights[name]; isBeside && !ok {
		return w, nil
	}
	if !ok {
		return weight{}, errors.New(`it has no tensor in "master"`)
	}
	if slices.Contains(tensor.Shape, 0) { // its strides may be any
		return weight{shape: tensor.Shape}, nil
	}
	at, err := t.locate(tensor, tensor.Shape)
	if err != nil {
		return weight{}, fmt.Errorf("master: %w", err)
	}
	return weight{tensor.Shape, at}, nil
}

// placesOf returns where the master weights and the moments of a state begin. All have
// the shape of the master weights.
func (a *archive) placesOf(master weight, moments []string, state any) ([]checkpoint.Numbers, error) {
	places := []checkpoint.Numbers{master.at}
	for _, component := range moments {
		moment, err := a.momentOf(pickle.Member(state, component), master.shape)
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
	for _, e := range pickle.Entries(state) {
		name := pickle.Shown(e.Key)
		if key, ok := e.Key.(string); ok {
			name = key
		}
		if e.Value != nil && !slices.Contains(moments, name) && name != "step" && name != string(ledger.MasterWeights) {
			return name
		}
	}
	return ""
}
