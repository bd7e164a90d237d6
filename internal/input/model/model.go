// Package model lists the named parameters of a model with their shapes,
// without their values. The list comes from the built-in catalog, a Hugging
// Face config.json, or the headers of safetensors files. So a plan needs
// neither Python nor the weights.
package model

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/hub"
	"plimsoll/internal/input/recipe/strict"
)

// Parameter is one named tensor of a model.
type Parameter struct {
	Name  string     `json:"name"`
	Shape []int64    `json:"shape"`
	DType dtype.Type `json:"dtype"`
	// Block is the index of the parameter's transformer block, or -1 outside of
	// the blocks.
	Block int `json:"block"`
	// TiedTo is the name of the parameter whose storage this one shares. It is
	// empty for a parameter with storage of its own.
	TiedTo string `json:"tied_to,omitempty"`
	// Frozen reports whether no gradient trains the parameter.
	Frozen bool `json:"-"`
	// Wide reports whether the weight stays in fp32 where the model is loaded in
	// bf16 or fp16 (_keep_in_fp32_modules_strict, or a module that is made so).
	Wide bool `json:"-"`
	// Beside reports whether the trainer added the parameter, which is then trained beside any adapter.
	Beside bool `json:"-"`
}

// Elements returns the number of elements.
func (p Parameter) Elements() int64 {
	product := int64(1)
	for _, size := range p.Shape {
		product *= size
	}
	return product
}

// Model is the list of the parameters of a model.
type Model struct {
	Name string `json:"name"`
	// Architecture is the class in transformers, as in architectures[0] of a
	// config.json. It is empty if only safetensors headers were read.
	Architecture string `json:"architecture,omitempty"`
	// Type is model_type of a config.json, such as "llama".
	Type string `json:"-"`
	// Source is the origin of the list: FromCatalog or a path.
	Source string `json:"source"`
	// Quantized reports whether config.json has a quantization_config. If so,
	// the weights are stored in another form than Parameters have.
	Quantized bool `json:"-"`
	// Namesake tells of a model of the catalog that was found by another owner's name. It is nil for others.
	Namesake *Namesake `json:"-"`
	// Parameters are in the order of the modules in transformers, except for
	// experts. From headers, they are in the order of the names.
	Parameters []Parameter `json:"parameters"`
	// Network is how the model computes. It is nil if only safetensors headers
	// were read: they do not tell.
	Network *Network `json:"-"`

	// Encoders are those of a model without a network.
	Encoders []Encoder `json:"-"`

	textType string     // model_type of the language model: that of text_config where there is one
	mixtures []*Mixture // of a model without a network, whose experts transformers 5 fuses
	hidden   int64      // then
}

// Elements returns the number of elements of all parameters. Tied parameters
// count once.
func (m *Model) Elements() int64 {
	var sum int64
	for _, p := range m.Parameters {
		if p.TiedTo == "" {
			sum += p.Elements()
		}
	}
	return sum
}

const (
	configName = "config.json"
	indexName  = "model.safetensors.index.json"
	singleName = "model.safetensors"
)

// FromCatalog is the source of models that are known by name.
const FromCatalog = "catalog"

// Load lists the parameters of a model. The argument is a name of the catalog,
// a config.json, a folder that holds one, a *.safetensors file, a
// model.safetensors.index.json, or a name on the Hugging Face hub. A name of the
// catalog takes precedence over a folder of the same name; "./gpt2" means the
// folder. A name on the hub is that of a model of the catalog, or one in the
// cache of huggingface_hub, or at last another owner's for one of the catalog
// (Model.Namesake). Headers list only what the files hold, so a tied
// parameter that was not saved is missing.
func Load(nameOrPath string) (*Model, error) { return load(nameOrPath, false) }

// LoadOnline is like Load. It asks the hub for a model that this host does not
// have.
func LoadOnline(nameOrPath string) (*Model, error) { return load(nameOrPath, true) }

func load(nameOrPath string, online bool) (*Model, error) {
	if text, ok := catalogConfig(nameOrPath); ok {
		doc, err := strict.ParseJSON(nameOrPath+".json", text)
		if err != nil {
			return nil, err
		}
		return fromConfig(doc, nameOrPath, FromCatalog)
	}
	info, err := os.Stat(nameOrPath)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return loadNamed(nameOrPath, online)
	case err != nil:
		return nil, unreadable(nameOrPath, err)
	case info.IsDir():
		return loadFolder(nameOrPath, folderName(nameOrPath))
	case strings.HasSuffix(nameOrPath, ".safetensors"):
		return loadSafetensors(nameOrPath, parentName(nameOrPath))
	case strings.HasSuffix(nameOrPath, ".index.json"):
		return loadIndex(nameOrPath, parentName(nameOrPath))
	default:
		return loadConfig(nameOrPath, parentName(nameOrPath))
	}
}

// loadNamed loads a model by its name on the hub.
func loadNamed(name string, online bool) (*Model, error) {
	if known, ok := fromAuthors(name); ok {
		return load(known, false)
	}
	if folder, ok := hub.Cached(name); ok && holdsModel(folder) {
		return loadFolder(folder, path.Base(name))
	}
	if online && hub.IsRepository(name) {
		file, err := hub.Download(name)
		if err != nil {
			return nil, err
		}
		return loadConfig(file, path.Base(name))
	}
	if known, c := copied(name); c != nil {
		m, err := load(known, false)
		if err == nil {
			m.Namesake = c
		}
		return m, err
	}
	return nil, unknownName(name, online)
}

// holdsModel reports whether a folder has a file that loadFolder reads. The cache may have the tokenizer only.
func holdsModel(folder string) bool {
	return slices.ContainsFunc([]string{configName, indexName, singleName}, func(name string) bool {
		return exists(filepath.Join(folder, name))
	})
}

// loadFolder prefers config.json, which describes tied parameters. It reads the
// headers of the weights if the architecture is unknown.
func loadFolder(folder, name string) (*Model, error) {
	var unknown *unknownArchitecture
	config := filepath.Join(folder, configName)
	if exists(config) {
		m, err := loadConfig(config, name)
		if !errors.As(err, &unknown) {
			return m, err
		}
	}
	read := loadIndex
	weights := filepath.Join(folder, indexName)
	if !exists(weights) {
		read, weights = loadSafetensors, filepath.Join(folder, singleName)
	}
	switch {
	case !exists(weights) && unknown != nil:
		return nil, unknown
	case !exists(weights):
		return nil, fault.File(folder).Inputf("the folder holds no %s, %s or %s", configName, indexName, singleName).
			WithHint("name the folder that the model was downloaded to, or a model of the catalog")
	}
	m, err := read(weights, name)
	if err == nil && unknown != nil {
		m.Architecture = unknown.name
	}
	return m, err
}

func loadConfig(path, name string) (*Model, error) {
	doc, err := readDocument(path)
	if err != nil {
		return nil, err
	}
	return fromConfig(doc, name, path)
}

func unreadable(path string, err error) error {
	var detail *fs.PathError
	if errors.As(err, &detail) {
		err = detail.Err
	}
	return &fault.Input{Where: fault.Position{File: path}, What: "cannot be read", Err: err}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func parentName(path string) string { return folderName(filepath.Dir(path)) }

func folderName(folder string) string {
	if absolute, err := filepath.Abs(folder); err == nil {
		folder = absolute
	}
	return filepath.Base(folder)
}

// maxDocument is far above any config.json or index. The index of a model of
// 75,000 tensors has 8 MB.
const maxDocument = 100_000_000

func readDocument(path string) (*strict.Document, error) {
	text, err := files.Read(path, maxDocument)
	var tooLarge *files.TooLarge
	switch {
	case errors.As(err, &tooLarge):
		return nil, fault.File(path).Inputf("more than %d bytes of JSON: this is not a model's description",
			maxDocument)
	case err != nil:
		return nil, unreadable(path, err)
	}
	return strict.ParseJSON(path, text)
}

// The limits of a model: 1,000 times the elements of the largest known model,
// and 7 times the tensors (Qwen3-Next has 74,391). Below them, sums and
// products of bytes never overflow an int64.
const (
	maxElements   = int64(1) << 50
	maxParameters = 1 << 19
)

// maxModules is the limit of a list of modules, such as layers or experts: 4 times the layers of the deepest known
// network. A plan walks every layer.
const maxModules = 1 << 12

// product multiplies the sizes of a shape. It returns false above maxElements.
func product(shape []int64) (int64, bool) {
	if slices.Contains(shape, 0) {
		return 0, true
	}
	count := int64(1)
	for _, size := range shape {
		if size > maxElements/count {
			return 0, false
		}
		count *= size
	}
	return count, true
}

// numberBlocks sets Block from the names. A block is an element of the first
// list on the path, such as "model.layers.17". The blocks of several lists,
// such as an encoder and a decoder, are numbered consecutively.
func numberBlocks(parameters []Parameter) {
	lists := []string{}
	sizes := map[string]int{}
	for _, p := range parameters {
		if list, index := blockOf(p.Name); index >= 0 {
			if _, ok := sizes[list]; !ok {
				lists = append(lists, list)
			}
			sizes[list] = max(sizes[list], index+1)
		}
	}
	first := map[string]int{}
	blocks := 0
	for _, list := range lists {
		first[list] = blocks
		blocks += sizes[list]
	}
	for i := range parameters {
		list, index := blockOf(parameters[i].Name)
		parameters[i].Block = index
		if index >= 0 {
			parameters[i].Block += first[list]
		}
	}
}

// blockOf splits "model.layers.17.mlp.up_proj.weight" into "model.layers" and
// 17. The index is -1 if the path has no list.
func blockOf(name string) (list string, index int) {
	start := 0
	for component := range strings.SplitSeq(name, ".") {
		if n, ok := listIndex(component); ok {
			return name[:start], n
		}
		start += len(component) + 1
	}
	return "", -1
}

func listIndex(component string) (int, bool) {
	if component == "" || component[0] > '9' { // the common case, without the cost of an error
		return 0, false
	}
	n, err := strconv.ParseUint(component, 10, 32)
	return int(n), err == nil && n < maxParameters
}
