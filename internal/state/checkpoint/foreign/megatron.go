package foreign

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

var megatronKind = kind{
	"checkpoint of Megatron's dist_checkpointing",
	"name the folder that has iter_0000100, or that folder; it must be saved with " +
		"--dist-ckpt-optim-fully-reshardable, as docs/checkpoints.md says",
}

// megatronPart is the part of all parameters of Megatron's checkpoints.
const megatronPart = "megatron"

// Far above the number of layers, or of experts in a layer, and of parameters of any model.
const (
	maxLayers     = 1 << 14
	maxParameters = 1 << 20
)

// maxConfig is far above the size of the small files of such a checkpoint.
const maxConfig = 1 << 16

// OpenMegatron opens a checkpoint of Megatron's dist_checkpointing, of format torch_dist:
// a checkpoint of torch.distributed.checkpoint with keys of Megatron's own. path is the
// folder of an iteration, or the one that names the latest.
func OpenMegatron(ctx context.Context, path string, progress func(bytes int64)) (*checkpoint.Checkpoint, error) {
	path, err := latestIteration(path)
	if err == nil {
		err = checkBackend(path)
	}
	if err != nil {
		return nil, err
	}
	return newMegatron(ctx, path, progress).open()
}

func newMegatron(ctx context.Context, path string, progress func(bytes int64)) *megatron {
	return &megatron{
		distcp: distcp{
			ctx: ctx, kind: megatronKind, path: path, progress: progress, names: map[string]bool{}, inBlobs: anyClass,
		},
		keys: map[string]string{},
	}
}

func (m *megatron) open() (*checkpoint.Checkpoint, error) {
	return m.assemble(anyClass, megatronPart, m.readParameters)
}

// latestName is the file that names the latest iteration, and commonName the one that all ranks have in common.
const latestName, commonName = "latest_checkpointed_iteration.txt", "common.pt"

// latestIteration returns the folder of the iteration that a file in the folder names.
func latestIteration(path string) (string, error) {
	text, err := readSmall(filepath.Join(path, latestName))
	if err != nil {
		return path, nil
	}
	number, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 31)
	if err != nil {
		return "", megatronKind.wrong(filepath.Join(path, latestName), "it does not have the number of an iteration")
	}
	return filepath.Join(path, fmt.Sprintf("iter_%07d", number)), nil
}

func readSmall(path string) ([]byte, error) {
	file, info, err := files.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return files.ReadOpen(file, info, maxConfig)
}

// checkBackend refuses other formats than torch_dist.
func checkBackend(path string) error {
	name := filepath.Join(path, "metadata.json")
	text, err := readSmall(name)
	if err != nil {
		return checkpoint.Cause(name, "this is no "+megatronKind.name, errors.Unwrap(err))
	}
	var config struct {
		Backend string `json:"sharded_backend"`
	}
	if err := json.Unmarshal(text, &config); err != nil || config.Backend == "" {
		return megatronKind.wrong(name, `it has no "sharded_backend"`)
	}
	if config.Backend != "torch_dist" {
		return megatronKind.wrong(name, "its format is %.40q, expected torch_dist", config.Backend)
	}
	return nil
}

// megatron is a checkpoint of Megatron's dist_checkpointing.
type megatron struct {
	distcp
	keys map[string]string // of the tensors of parameters: "exp_avg" and name -> key
	step int64

	// Where a checkpoint like this one has other numbers: the parameters themselves beside their master weights, and
	// the archives of all tensors. They are looked for only if the checkpoint is a template.
	template bool
	weights  []parameterPlace
	used     []blob
	commonIn string // the blob that has the step, if it is not in common.pt
}

var (
	// megatronState is the key of a state: the component and the parameter's key.
	megatronState = lazyregexp.New(`^(?:chained_\d+\.)?optimizer\.state\.([a-z_0-9]+)\.(.+)$`)
	// megatronLayers is in the key of a parameter that all layers share. Its tensor has
	// a dimension for the layers.
	megatronLayers = lazyregexp.New(`(^|\.)layers\.(?:[^0-9])`)
	// megatronHalf ends the keys of the two halves of a gated projection.
	megatronHalf = lazyregexp.New(`_[wv]$`)
)

// readParameters finds the state of every parameter.
func (m *megatron) readParameters() error {
	for _, key := range slices.Concat(m.distcp.keys, slices.Sorted(maps.Keys(m.blobs))) {
		if strings.Contains(key, "optimizer.distributed.") {
			return fmt.Errorf("%q is of the format dp_reshardable or dp_zero_gather_scatter, whose buckets do not say "+
				"where parameters begin: expected fully_reshardable or fully_sharded_model_space", key)
		}
	}
	for _, key := range m.distcp.keys {
		if err := m.note(key); err != nil {
			return err
		}
	}
	if len(m.names) == 0 {
		return errors.New("it has no state of an optimizer, such as optimizer.state.exp_avg.NAME")
	}
	if err := m.readCommon(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(m.names)) {
		if err := m.addParameter(name); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
	}
	return nil
}

// note notes the key of a state.
func (m *megatron) note(key string) error {
	match := megatronState.FindStringSubmatch(key)
	if match == nil {
		return nil
	}
	component, name := match[1], match[2]
	switch component {
	case "step":
		return nil
	case "param":
		component = "fp32_param"
	case "fp32_param", "exp_avg", "exp_avg_sq":
	default:
		return fmt.Errorf("%q is no state of AdamW: expected fp32_param, exp_avg and exp_avg_sq", key)
	}
	switch {
	case megatronHalf.MatchString(name):
		return fmt.Errorf("%q is one half of a projection, as singleton_local_shards saves it: expected one tensor",
			key)
	case m.keys[component+"."+name] != "":
		return fmt.Errorf("%q and %q are the same state", key, m.keys[component+"."+name])
	}
	m.keys[component+"."+name] = key
	m.names[name] = true
	return nil
}

// addParameter adds the parameters of a key.
func (m *megatron) addParameter(name string) error {
	master := m.keys["fp32_param."+name]
	if master == "" {
		master = name // the parameter itself is fp32
	}
	var at []checkpoint.Numbers
	var shape []int64
	for i, key := range []string{master, m.keys["exp_avg."+name], m.keys["exp_avg_sq."+name]} {
		t := m.tensors[key]
		if t == nil {
			return errors.New("it lacks its fp32 weights, exp_avg or exp_avg_sq")
		}
		g, err := m.gridOf(t)
		if t.before != nil {
			g, err = m.flattened(t)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", key, err)
		}
		if i > 0 && !slices.Equal(g.shape, shape) {
			return fmt.Errorf("its weights and moments have the shapes %v and %v", shape, g.shape)
		}
		shape, at = g.shape, append(at, g)
	}
	if m.template {
		g, err := m.noteForWriting(name, master, shape)
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		at = append(at, g...)
	}
	return m.addAll(name, shape, at)
}

// noteForWriting notes the archives of a parameter. It returns where the parameter itself is, beside its master
// weights.
func (m *megatron) noteForWriting(name, master string, shape []int64) ([]checkpoint.Numbers, error) {
	for _, key := range []string{master, m.keys["exp_avg."+name], m.keys["exp_avg_sq."+name]} {
		m.noteChunks(m.tensors[key])
	}
	t := m.tensors[name]
	if master == name || t == nil {
		return nil, nil
	}
	if t.before != nil || !slices.Equal(t.shape, shape) {
		return nil, fmt.Errorf("the parameter has the shape %v, and its master weights %v", t.shape, shape)
	}
	m.noteChunks(t)
	if t.isBF16 {
		g, err := m.gridWith(t, func(a *archive, tensor pickle.Tensor, sizes []int64) (checkpoint.Location, error) {
			if tensor.Kind != "BFloat16Storage" {
				return checkpoint.Location{}, fmt.Errorf("a tensor with a %s, expected bf16", tensor.Kind)
			}
			return a.locateBytes(tensor, sizes, 2)
		})
		g.of = dtype.BF16
		return []checkpoint.Numbers{g}, err
	}
	g, err := m.gridOf(t)
	return []checkpoint.Numbers{g}, err
}

func (m *megatron) noteChunks(t *savedTensor) {
	for _, c := range t.chunks {
		if !slices.Contains(c.sizes, 0) {
			m.used = append(m.used, c.blob)
		}
	}
}

// megatronExperts is in the key of a parameter that all experts of a layer share. Its tensor has a dimension for the
// experts. One of them has localExperts in its name, as in the module of several experts.
const megatronExperts, localExperts = ".experts.experts.", ".experts.local_experts."

// addAll adds a parameter, or those of all layers and experts.
func (m *megatron) addAll(name string, shape []int64, at []checkpoint.Numbers) error {
	before, after, ok := strings.Cut(name, megatronExperts)
	if ok {
		before += localExperts
	}
	if place := megatronLayers.FindStringIndex(name); place != nil {
		before, after, ok = name[:place[1]-1], name[place[1]-1:], true
	}
	if !ok {
		return m.add(name, shape, at)
	}
	if len(shape) == 0 || shape[0] > maxLayers {
		return fmt.Errorf("several layers or experts share it, but its first dimension is not that of up to %d: it "+
			"has the shape %v", maxLayers, shape)
	}
	own := shard.Piece{Shape: shape[1:]}
	count, _ := own.Elements() // a part of a shape with elements
	for number := range shape[0] {
		sections := make([]checkpoint.Numbers, len(at))
		for i := range at {
			sections[i] = section{at[i], number * count}
		}
		if err := m.addAll(before+strconv.FormatInt(number, 10)+"."+after, own.Shape, sections); err != nil {
			return err
		}
	}
	return nil
}

func (m *megatron) add(name string, shape []int64, at []checkpoint.Numbers) error {
	p := shard.Piece{Name: name, Shape: shape}
	p.Count, _ = p.Elements() // a grid has elements
	if err := p.Validate(); err != nil {
		return err
	}
	if own := m.rank(0); len(own.Pieces) >= maxParameters {
		return fmt.Errorf("it has more than %d parameters", maxParameters)
	}
	if len(at) > 3 {
		m.weights = append(m.weights, parameterPlace{p, at[3]})
	}
	return m.rank(0).Add(p, kernel.Adam, m.step, at[:3])
}

// flattened returns the grid of a tensor that data parallel ranks divide. Its last
// dimension is the numbers of a block, the other ones count blocks.
func (m *megatron) flattened(t *savedTensor) (grid, error) {
	last := len(t.before)
	if len(t.shape) != last+1 {
		return grid{}, fmt.Errorf("the shape %v, flattened to %v", t.before, t.shape)
	}
	if _, err := (shard.Piece{Shape: t.before}).Elements(); err != nil {
		return grid{}, err
	}
	each := make([]int64, last)
	for i, n := range t.before {
		if t.shape[i] < 1 || n%t.shape[i] != 0 {
			return grid{}, fmt.Errorf("the shape %v, flattened to %v", t.before, t.shape)
		}
		each[i] = n / t.shape[i]
	}
	if n, _ := (shard.Piece{Shape: each}).Elements(); n != t.shape[last] {
		return grid{}, fmt.Errorf("the shape %v, flattened to %v", t.before, t.shape)
	}
	var blocks []*block
	for _, c := range t.chunks { // in the order of their offsets
		if len(c.offsets) != last+1 || len(c.sizes) != last+1 {
			return grid{}, fmt.Errorf("a chunk at %v of %v in the shape %v", c.offsets, c.sizes, t.shape)
		}
		if c.sizes[last] == 0 {
			continue
		}
		b := &block{offsets: make([]int64, last), sizes: each}
		for i, n := range c.offsets[:last] {
			if c.sizes[i] != 1 || n >= t.shape[i] {
				return grid{}, fmt.Errorf("a chunk at %v of %v, expected a part of one block", c.offsets, c.sizes)
			}
			b.offsets[i] = n * each[i]
		}
		end := int64(0)
		if n := len(blocks); n > 0 && slices.Equal(blocks[n-1].offsets, b.offsets) {
			b, end = blocks[n-1], blocks[n-1].end
		} else {
			blocks = append(blocks, b)
		}
		at, err := m.locate(c)
		if err != nil {
			return grid{}, err
		}
		if c.offsets[last] != end || c.sizes[last] > t.shape[last]-end {
			return grid{}, fmt.Errorf("a chunk at %v of %v, expected the next one at %d", c.offsets, c.sizes, end)
		}
		b.starts, b.places, b.end = append(b.starts, end), append(b.places, at), end+c.sizes[last]
	}
	for _, b := range blocks {
		if b.end != t.shape[last] {
			return grid{}, fmt.Errorf("the block at %v ends at %d, expected %d", b.offsets, b.end, t.shape[last])
		}
	}
	return newGrid(t.before, blocks)
}

// readCommon reads the step. It is in common.pt, or with newer releases in a file of
// tensors.
func (m *megatron) readCommon() error {
	use := func(a *archive, document any) (err error) {
		if all := pickle.Items(document); len(all) == 1 {
			document = all[0]
		}
		m.step, err = commonStep(a, pickle.Member(document, "optimizer"))
		return err
	}
	const key = "common_state/shard_0_1"
	if b, ok := m.blobs[key]; ok {
		m.commonIn = key
		return m.withBlob(b, use)
	}
	return withArchive(m.ctx, filepath.Join(m.path, commonName), megatronKind, anyClass, nil, use)
}

// commonStep returns the step of an optimizer or of several chained ones, which is the
// same for all parameter groups.
func commonStep(a *archive, optimizer any) (int64, error) {
	steps := allSteps(optimizer)
	if len(steps) == 0 {
		return 0, errors.New("its optimizer has no step")
	}
	var first int64
	for i, s := range steps {
		step, err := a.stepOf(kernel.Adam, s)
		if err != nil {
			return 0, err
		}
		if i == 0 {
			first = step
		}
		if step != first {
			return 0, fmt.Errorf("its parameter groups are at the steps %d and %d, expected one", first, step)
		}
	}
	return first, nil
}

// allSteps returns the steps of an optimizer or of several chained ones.
func allSteps(optimizer any) []any {
	steps := stepsOf(optimizer)
	for _, chained := range byKey[int64](optimizer) {
		steps = append(steps, stepsOf(chained)...)
	}
	return steps
}

// stepsOf returns the steps that an optimizer's state has.
func stepsOf(optimizer any) []any {
	var steps []any
	for _, own := range []any{optimizer, pickle.Member(optimizer, "optimizer")} {
		if step := pickle.Member(pickle.Member(own, "state"), "common_step"); step != nil {
			steps = append(steps, step)
		}
		for _, group := range pickle.Items(pickle.Member(own, "param_groups")) {
			if step := pickle.Member(group, "step"); step != nil {
				steps = append(steps, step)
			}
		}
	}
	return steps
}
