package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/input/model"
)

// families derive the architecture from the name of a model; the first match counts. config makes the fields that
// differ between families.
var families = []struct {
	pattern, architecture string
	config                func(m sizes, c object)
}{
	{"falcon", "FalconForCausalLM", func(m sizes, c object) {
		c["multi_query"], c["parallel_attn"], c["bias"], c["alibi"], c["new_decoder_architecture"] = true, true,
			false, false, false
	}},
	{"mistral", "MistralForCausalLM", nil},
	{"stablelm-base-alpha|pythia|neox", "GPTNeoXForCausalLM", nil},
	{"qwen2-?moe", "Qwen2MoeForCausalLM", nil},
	{"llama|yi-|vicuna|alpaca", "LlamaForCausalLM", nil},
	{`opt-`, "OPTForCausalLM", func(m sizes, c object) {
		c["ffn_dim"], c["max_position_embeddings"] = m.Inner, 2048
		if width := m.Note.find(`word_embed_proj_dim (\d+)`); width != "" {
			c["word_embed_proj_dim"] = jsonNumber(width)
		}
		c["do_layer_norm_before"] = !m.Note.has("post-LN")
	}},
	{"roberta", "RobertaForMaskedLM", func(m sizes, c object) {
		c["max_position_embeddings"], c["type_vocab_size"] = 514, 1
	}},
	{`\bbert`, "BertForPreTraining", func(m sizes, c object) {
		c["max_position_embeddings"], c["type_vocab_size"] = 512, 2
		if m.Note.has("sequence classification") {
			c["architectures"] = []string{"BertForSequenceClassification"}
		}
	}},
	{`t0|t5`, "T5ForConditionalGeneration", func(m sizes, c object) {
		c["d_model"], c["d_ff"], c["num_layers"], c["num_heads"], c["d_kv"] = m.Hidden, m.Inner, m.Layers, m.Heads, 64
		if m.Tied != nil && !*m.Tied { // T5 1.1 has both
			c["feed_forward_proj"] = "gated-gelu"
		}
	}},
	{`\bvit_`, "ViTForImageClassification", func(m sizes, c object) {
		name := text(m.Name)
		c["patch_size"], c["image_size"] = jsonNumber(name.find(`patch(\d+)`)), jsonNumber(name.find(`patch\d+_(\d+)`))
		c["num_labels"] = max(1, jsonNumber(m.Note.find(`(\d+)-class head`)))
	}},
	{`gpt-?[23]|learned pos|\bgpt($|[^-])|turing-?nlg`, "GPT2LMHeadModel", func(m sizes, c object) {
		c["n_embd"], c["n_layer"], c["n_head"], c["n_inner"], c["n_positions"] = m.Hidden, m.Layers, m.Heads, m.Inner,
			1024
		if positions := text(m.Name).find(`learned pos (\d+)`); positions != "" {
			c["n_positions"] = jsonNumber(positions)
		}
	}},
}

func jsonNumber(digits string) (n int) {
	fmt.Sscan(digits, &n)
	return n
}

// chooseModel takes the model of that name from the catalog if its sizes match the row's. Otherwise it writes a
// config.json with the row's sizes: that of the catalog's model, or one of the architecture that the name belongs to.
func (e *expression) chooseModel() error {
	if m := bareLinears.FindStringSubmatch(strings.ToLower(e.Model.Name)); m != nil {
		return e.useLinears(jsonNumber(m[1]), jsonNumber(m[2]), jsonNumber(m[3]), m[4] != "")
	}
	name := joined(e.Model.Name)
	for _, known := range slices.Backward(model.Catalog()) {
		if !strings.Contains(name, joined(known)) {
			continue
		}
		loaded, err := model.Load(known)
		if err == nil && e.Model.fits(loaded) {
			e.request.Model, e.model = known, loaded
			return e.asReward()
		}
		if text, ok := model.CatalogConfig(known); ok && e.Model.Elements == 0 && e.Model.Layers > 0 {
			c := object{}
			if err := json.Unmarshal(text, &c); err != nil {
				return err
			}
			c["num_hidden_layers"] = e.Model.Layers
			delete(c, "layer_types")
			return e.use(c)
		}
	}
	c, err := e.configOf(e.Model)
	if err != nil {
		return err
	}
	return e.use(c)
}

// joined returns a name as all its writers agree on: Llama 2 7B is llama-2-7b. Models that were trained further have
// the name of the first.
func joined(name string) string {
	return strings.NewReplacer(" ", "", "-", "", "_", "", "vicuna", "llama", "alpaca", "llama", "zephyr", "mistral").
		Replace(strings.ToLower(name))
}

// fits reports whether the sizes that are known are those of a model.
func (m sizes) fits(known *model.Model) bool {
	if known.Network == nil {
		return false
	}
	same := func(given number, size int) bool { return given == 0 || int(given) == size }
	rounded := m.Elements > 0 && m.Elements%1e7 == 0 && // as 7 billion are
		math.Abs(float64(m.Elements)/float64(known.Elements())-1) < 0.05
	return (rounded || same(m.Elements, int(known.Elements()))) &&
		same(m.Vocabulary, int(known.Network.Head.Outputs)) &&
		same(m.Layers, len(known.Network.Blocks()))
}

// bareLinears are models of linear modules alone.
var bareLinears = regexp.MustCompile(`^(\d+) ?x nn\.linear\((\d+), ?(\d+)\)(\+bias)?`)

// useLinears writes a safetensors file of linear modules, a file with holes for its data.
func (e *expression) useLinears(count, in, out int, bias bool) error {
	header, end := object{}, 0
	add := func(name string, elements int, shape ...int) {
		header[name] = object{"dtype": "BF16", "shape": shape, "data_offsets": []int{end, end + 2*elements}}
		end += 2 * elements
	}
	for i := range count {
		add(fmt.Sprintf("%d.weight", i), in*out, out, in)
		if bias {
			add(fmt.Sprintf("%d.bias", i), out, out)
		}
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	path := filepath.Join(e.folder, "model.safetensors")
	content := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return err
	}
	if err := os.Truncate(path, int64(len(content)+end)); err != nil {
		return err
	}
	e.request.Model = path
	e.model, err = model.Load(path)
	return err
}

// use writes a config.json.
func (e *expression) use(c object) (err error) {
	if e.request.Model, err = e.write("config.json", c); err != nil {
		return err
	}
	if e.model, err = model.Load(e.request.Model); err != nil {
		return err
	}
	given := float64(e.Model.Elements)
	if stated := e.Model.Note.find(`= ?(\d[\d.]*e\d+) params`); given == 0 && stated != "" {
		fmt.Sscan(stated, &given)
	}
	if has := float64(e.model.Elements()); given > 0 && math.Abs(has/given-1) > 0.25 {
		return fmt.Errorf("a model of these sizes has %.3g parameters, but the source says %.3g", has, given)
	}
	return e.asReward()
}

// asReward gives the model one output for a reward, as the sequence classifiers of transformers have.
func (e *expression) asReward() error {
	if !text(e.Source).has("reward") || e.model.Network.Head.Classes {
		return nil
	}
	text, err := os.ReadFile(e.request.Model)
	if err != nil {
		text, _ = model.CatalogConfig(e.request.Model)
	}
	c := object{}
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	before, _, _ := strings.Cut(e.model.Architecture, "For")
	c["architectures"], c["num_labels"] = []string{before + "ForSequenceClassification"}, 1
	return e.use(c)
}

// architectureOf returns the architecture that a name belongs to, and what its config.json has beside sizes.
func architectureOf(name string) (architecture string, fields func(sizes, object)) {
	for _, f := range families {
		if text(name).has(f.pattern) {
			return f.architecture, f.config
		}
	}
	longest := ""
	name = strings.ReplaceAll(strings.ToLower(name), " ", "-")
	for _, entry := range model.Catalog() {
		family := familyOf(entry)
		if !text(name).has(`(^|[^a-z])`+regexp.QuoteMeta(family)) || len(family) <= len(longest) {
			continue
		}
		if known, err := model.Load(entry); err == nil && known.Network != nil {
			longest, architecture = family, known.Architecture
		}
	}
	return architecture, nil
}

// familyOf returns what the names of models with the architecture of a model begin with: qwen3 of qwen3-8b, and gpt-j
// of gpt-j-6b, as gpt-oss begins with gpt, too.
func familyOf(entry string) string {
	parts := strings.SplitN(entry, "-", 3)
	if len(parts) < 3 || text(parts[1]).has(`^[\d.]+[bm]$`) {
		return parts[0]
	}
	return parts[0] + "-" + parts[1]
}

// vocabularyOf returns the vocabulary of the first model of the catalog whose family the name begins with.
func vocabularyOf(name string) number {
	for _, entry := range model.Catalog() {
		family := strings.TrimRight(strings.SplitN(entry, "-", 2)[0], ".0123456789")
		if !text(name).has(`\b` + family) {
			continue
		}
		if known, err := model.Load(entry); err == nil && known.Network != nil {
			return number(known.Network.Head.Outputs)
		}
	}
	return 0
}

// configOf returns a config.json with these sizes. A vocabulary or an inner width that is not known follows from the
// number of parameters.
func (e *expression) configOf(m sizes) (object, error) {
	architecture, fields := architectureOf(m.Name)
	switch {
	case architecture == "":
		return nil, fmt.Errorf("%s is not of an architecture that Plimsoll describes", m.Name)
	case m.Layers == 0 || m.Hidden == 0 || m.Heads == 0:
		return nil, fmt.Errorf("the sizes of %s are not known", m.Name)
	}
	config := func(m sizes) object {
		c := object{
			"architectures":       []string{architecture},
			"hidden_size":         m.Hidden,
			"num_hidden_layers":   m.Layers,
			"num_attention_heads": m.Heads,
			"intermediate_size":   m.Inner,
			"vocab_size":          m.Vocabulary,
			"torch_dtype":         "float32",
		}
		if m.KeyHeads > 0 {
			c["num_key_value_heads"] = m.KeyHeads
		}
		if m.HeadWidth > 0 {
			c["head_dim"] = m.HeadWidth
		}
		if m.Tied != nil {
			c["tie_word_embeddings"] = *m.Tied
		}
		if m.Experts > 0 {
			c["num_experts"], c["num_local_experts"], c["num_experts_per_tok"] = m.Experts, m.Experts, m.Chosen
			c["moe_intermediate_size"], c["shared_expert_intermediate_size"] = m.Inner, m.Inner
		}
		if fields != nil {
			fields(m, c)
		}
		if positions, ok := c["n_positions"].(int); ok {
			c["n_positions"] = max(positions, int(e.Sequence))
		}
		return c
	}
	switch {
	case architecture == "ViTForImageClassification": // which has no vocabulary
		return config(m), nil
	case architecture == "GPT2LMHeadModel" && m.Inner == 0 && m.Vocabulary == 0: // GPT2Config's defaults
		m.Inner, m.Vocabulary = 4*m.Hidden, 50257
		return config(m), nil
	case m.Inner == 0 && m.Vocabulary == 0:
		if m.Vocabulary = vocabularyOf(m.Name); m.Vocabulary == 0 {
			return nil, fmt.Errorf("the sizes of %s are not known", m.Name)
		}
		fallthrough
	case m.Inner == 0:
		return e.solve(m, config, func(m *sizes, n number) { m.Inner = n })
	case m.Vocabulary == 0:
		return e.solve(m, config, func(m *sizes, n number) { m.Vocabulary = n })
	}
	return config(m), nil
}

// solve returns the config.json with the number of parameters that a row gives. The parameters grow linearly with the
// size that set changes.
func (e *expression) solve(m sizes, config func(sizes) object, set func(*sizes, number)) (object, error) {
	elements := func(n number) (int64, error) {
		set(&m, n)
		path, err := e.write("trial.json", config(m))
		if err != nil {
			return 0, err
		}
		loaded, err := model.Load(path)
		if err != nil {
			return 0, err
		}
		return loaded.Elements(), nil
	}
	const low, high = 1024, 2048
	few, err := elements(low)
	if err != nil {
		return nil, err
	}
	more, err := elements(high)
	if err != nil {
		return nil, err
	}
	n := low + number((float64(m.Elements)-float64(few))*(high-low)/float64(more-few))
	if n <= 0 {
		return nil, fmt.Errorf("the sizes of %s are not known", m.Name)
	}
	set(&m, n)
	return config(m), nil
}
