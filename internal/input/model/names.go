package model

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/hub"
)

// authors are the organizations on the hub whose models the catalog has.
var authors = []string{
	"01-ai", "agentica-org", "ai21labs", "albert", "allenai", "answerdotai", "arcee-ai", "baai", "baidu", "bigcode",
	"bigscience", "bytedance-seed", "canopylabs", "cerebras", "codellama", "cohereforai", "coherelabs",
	"deepcogito", "deepseek-ai", "distil-whisper", "distilbert", "eleutherai", "facebook", "facebookai", "google",
	"google-bert", "google-t5", "huggingfacetb", "ibm-granite", "katanemo", "laion", "liquidai", "llava-hf",
	"meta-llama", "microsoft", "minimaxai", "mistralai", "moonshotai", "mosaicml", "nvidia", "openai",
	"openai-community", "opengvlab", "openlm-research", "paddlepaddle", "qwen", "skywork", "stabilityai",
	"state-spaces", "swiss-ai", "tencent", "thudm", "tiiuae", "tinyllama", "togethercomputer", "xiaomimimo",
	"zai-org",
	"huggyllama", "nousresearch", // have copies of Meta's models
	"mistral-community", // has copies of Mistral AI's models
}

// irregular maps names on the hub, in lower case, to those of the catalog.
var irregular = map[string]string{
	"mistral-7b-v0.1":                 "mistral-7b",
	"mistral-7b-instruct-v0.1":        "mistral-7b",
	"mistral-7b-instruct-v0.2":        "mistral-7b-v0.2",
	"mistral-7b-instruct-v0.3":        "mistral-7b-v0.3",
	"mathstral-7b-v0.1":               "mistral-7b-v0.3",
	"mixtral-8x7b-v0.1":               "mixtral-8x7b",
	"mixtral-8x7b-instruct-v0.1":      "mixtral-8x7b",
	"mixtral-8x22b-v0.1":              "mixtral-8x22b",
	"mixtral-8x22b-instruct-v0.1":     "mixtral-8x22b",
	"mistral-nemo-base-2407":          "mistral-nemo-12b",
	"mistral-nemo-instruct-2407":      "mistral-nemo-12b",
	"mistral-small-24b-base-2501":     "mistral-small-24b-2501",
	"mistral-small-24b-instruct-2501": "mistral-small-24b-2501",
	"devstral-small-2505":             "mistral-small-24b-2501",
	"devstral-small-2507":             "mistral-small-24b-2501",
	"magistral-small-2506":            "mistral-small-24b-2501",
	"magistral-small-2507":            "mistral-small-24b-2501",
	"phi-1_5":                         "phi-1.5",
	"phi-3-mini-4k-instruct":          "phi-3-mini",
	"phi-3-mini-128k-instruct":        "phi-3-mini",
	"phi-3.5-mini-instruct":           "phi-3-mini",
	"phi-3-medium-4k-instruct":        "phi-3-medium",
	"phi-3-medium-128k-instruct":      "phi-3-medium",
	"tinyllama-1.1b-chat-v1.0":        "tinyllama-1.1b",
	"tinyllama_v1.1":                  "tinyllama-1.1b",
	"open_llama_3b_v2":                "open_llama_3b",
	"open_llama_7b_v2":                "open_llama_7b",
	"llama-3.3-70b":                   "llama-3.1-70b",
	"gpt-oss-safeguard-20b":           "gpt-oss-20b",
	"gpt-oss-safeguard-120b":          "gpt-oss-120b",
	"distil-large-v3.5":               "distil-large-v3",
	"redpajama-incite-base-3b-v1":     "redpajama-incite-3b",
	"redpajama-incite-chat-3b-v1":     "redpajama-incite-3b",
	"qwq-32b":                         "qwen2.5-32b",
	"deepseek-v2.5":                   "deepseek-v2",
	"deepseek-coder-v2":               "deepseek-v2",
	"deepseek-coder-v2-lite":          "deepseek-v2-lite",
	"deepseek-v3-0324":                "deepseek-v3",
	"deepseek-v3.1":                   "deepseek-v3",
	"deepseek-r1":                     "deepseek-v3",
	"deepseek-r1-0528":                "deepseek-v3",
	"deepseek-r1-distill-llama-8b":    "llama-3.1-8b",
	"deepseek-r1-distill-llama-70b":   "llama-3.1-70b",
	"deepseek-r1-distill-qwen-7b":     "qwen2.5-7b",
	"deepseek-r1-distill-qwen-14b":    "qwen2.5-14b",
	"deepseek-r1-distill-qwen-32b":    "qwen2.5-32b",
	"deepseek-r1-0528-qwen3-8b":       "qwen3-8b",
	"deepcoder-14b-preview":           "qwen2.5-14b",
	"magistral-small-2509":            "mistral-small-3.1-24b",
	"mistral-small-3.2-24b":           "mistral-small-3.1-24b",
	"olmo-3-1025-7b":                  "olmo-3-7b",
	"olmo-3-1125-32b":                 "olmo-3-32b",
	"olmo-3.1-32b":                    "olmo-3-32b",
	"qwen3-coder-30b-a3b":             "qwen3-30b-a3b",
	"qwen3-coder-next":                "qwen3-next-80b-a3b",
	"glm-4.6":                         "glm-4.5",
	"glm-4.7":                         "glm-4.5",
	"minimax-m2.1":                    "minimax-m2",
	"minimax-m2.5":                    "minimax-m2",
	"minimax-m2.7":                    "minimax-m2",
	"medgemma-4b":                     "gemma-3-4b",
	"medgemma-27b":                    "gemma-3-27b",
	"hermes-3-llama-3.1-8b":           "llama-3.1-8b",
	"hermes-3-llama-3.1-70b":          "llama-3.1-70b",
	"llama-3.1-nemotron-70b":          "llama-3.1-70b",
	"deepseek-coder-6.7b-instruct":    "deepseek-coder-6.7b",
	"yi-1.5-9b-chat-16k":              "yi-1.5-9b",
	"qwen3.6-27b":                     "qwen3.5-27b",
	"qwen3.6-35b-a3b":                 "qwen3.5-35b-a3b",
	"ai21-jamba-1.5-large":            "jamba-1.5-large",
	"cogito-v1-preview-llama-3b":      "llama-3.2-3b",
	"cogito-v1-preview-llama-8b":      "llama-3.1-8b",
	"cogito-v1-preview-llama-70b":     "llama-3.1-70b",
	"cogito-v1-preview-qwen-14b":      "qwen2.5-14b",
	"cogito-v1-preview-qwen-32b":      "qwen2.5-32b",
	"orpheus-3b-0.1-pretrained":       "orpheus-3b-0.1",
	"orpheus-3b-0.1-ft":               "orpheus-3b-0.1",
	"paddleocr-vl-1.5":                "paddleocr-vl",
	"paddleocr-vl-1.6":                "paddleocr-vl",
	"plano-orchestrator-4b":           "qwen3-4b",
	"skywork-reward-v2-qwen3-0.6b":    "qwen3-0.6b",
	"skywork-reward-v2-qwen3-1.7b":    "qwen3-1.7b",
	"skywork-reward-v2-qwen3-4b":      "qwen3-4b",
	"skywork-reward-v2-qwen3-8b":      "qwen3-8b",
	"trinity-nano-preview":            "trinity-nano",
	"mimo-7b-rl":                      "mimo-7b",
	"mimo-7b-rl-zero":                 "mimo-7b",
	"smollm3-3b-checkpoints":          "smollm3-3b",
	"zephyr-7b-sft-full":              "mistral-7b",
	"zephyr-7b-alpha":                 "mistral-7b",
	"zephyr-7b-beta":                  "mistral-7b",
	"qwen2.5-7b-rope-300k":            "qwen2.5-7b", // of Qwen2.5-Math
}

// tuning ends the name of a model that has the sizes of the model before it: a way of training, a format of 16 bits, or
// the year and month of a release.
var tuning = lazyregexp.New(`-(?:instruct|chat|base|hf|it|pt|deduped|think|thinking|reasoning|sft|dpo|` +
	`bf16|fp16|dequantized|2[3-9](?:0[1-9]|1[0-2]))$`)

// fromAuthors returns the name in the catalog of a model that its authors, or
// the user without naming an organization, call by this name.
func fromAuthors(name string) (known string, ok bool) {
	organization, rest, found := strings.Cut(strings.ToLower(name), "/")
	if !found {
		return fromHubName(organization)
	}
	if !slices.Contains(authors, organization) {
		return "", false
	}
	return fromHubName(rest)
}

// IsNamed reports whether the catalog has a model that its authors or the user call by this name.
func IsNamed(name string) bool {
	_, ok := fromAuthors(name)
	return ok
}

// series match parts of names that do not change the sizes of a series.
var series = strings.NewReplacer("qwen2.5-coder-", "qwen2.5-", "qwen2.5-math-", "qwen2.5-")

// joint matches a family's name and its number, which people write with or without a hyphen.
var joint = lazyregexp.New(`^([a-z]+)(-?)([0-9])`)

func fromHubName(name string) (known string, ok bool) {
	name = strings.TrimPrefix(strings.TrimPrefix(name, "meta-"), "nvidia-")
	name = series.Replace(name)
	for {
		name = cmp.Or(irregular[name], name)
		if _, ok := catalogConfig(name); ok {
			return name, true
		}
		spelled := joint.ReplaceAllString(name, "$1-$3")
		if spelled == name {
			spelled = joint.ReplaceAllString(name, "$1$3")
		}
		if _, ok := catalogConfig(spelled); ok {
			return spelled, true
		}
		shorter := tuning.ReplaceAllString(name, "")
		if shorter == name {
			return "", false
		}
		name = shorter
	}
}

// stored matches the ends of names of weights that bitsandbytes has quantized to NF4, all linear modules alike.
var stored = lazyregexp.New(`-bnb-(?:4bit|nf4)(?:-bf16)?$`)

// Namesake is a model of the catalog by the name of another owner. Nothing but the name tells that it is one.
type Namesake struct {
	Name       string
	NF4        bool // the name says that the weights are stored in 4 bits
	Linearized bool // the name says that every expert has modules of its own, as Model.Linearized makes them
}

// copied returns the model of the catalog that the name of another owner's repository names in full.
func copied(name string) (known string, c *Namesake) {
	if !hub.IsRepository(name) {
		return "", nil
	}
	lower := strings.ToLower(path.Base(name))
	base := stored.ReplaceAllString(lower, "")
	if strings.HasSuffix(base, "-unsloth") { // which leaves some modules in 16 bits
		return "", nil
	}
	known, ok := fromHubName(strings.TrimSuffix(base, "-linearized"))
	if !ok {
		return "", nil
	}
	return known, &Namesake{name, base != lower, strings.HasSuffix(base, "-linearized")}
}

// LoadAbsent loads the model of the catalog that a path names in full by its last folder, where the path is not on this
// host: a configuration names the folder of the host that trains. It returns nil where the path is here, or names no
// model of the catalog.
func LoadAbsent(file string) *Model {
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	known, c := ofFolder(file)
	if c == nil {
		return nil
	}
	m, err := load(known, false)
	if err != nil {
		return nil
	}
	m.Namesake = c
	return m
}

// ofFolder returns the model of the catalog that the last folder of a path names in full.
func ofFolder(file string) (known string, c *Namesake) {
	folders := strings.FieldsFunc(file, func(r rune) bool { return r == '/' || r == '\\' })
	if n := len(folders); n > 2 && folders[n-2] == "snapshots" { // of huggingface_hub's cache
		folders = folders[:n-2]
	}
	if len(folders) < 2 && !strings.HasPrefix(file, "/") {
		return "", nil
	}
	name := strings.ReplaceAll(folders[len(folders)-1], "___", ".") // as ModelScope's cache writes a dot
	if found := owned.FindStringSubmatchIndex(name); found != nil {
		owner, marked := strings.ToLower(name[found[2]:found[3]]), name[found[4]:found[5]] != "."
		if marked || slices.Contains(authors, owner) {
			name = name[found[1]:]
		}
	}
	for _, spelled := range []string{name, underscored.ReplaceAllString(name, "$1.$2")} {
		if known, c = copied("of/" + spelled); c != nil {
			c.Name = file
			return known, c
		}
	}
	return "", nil
}

// underscored matches a number with an underscore for its point, as names of folders have it: Qwen3-1_7B.
var underscored = lazyregexp.New(`([0-9])_([0-9])`)

// owned matches the owner before a model's name in a folder that has both: models--Qwen--Qwen3-8B, Qwen__Qwen3-8B.
var owned = lazyregexp.New(`^(?:models--)?([A-Za-z0-9-]*?[A-Za-z0-9])(--|__|\.)`)

// quantized matches the ends of names of repositories with quantized weights.
var quantized = lazyregexp.New(`-(?:unsloth-)?(bnb-4bit|gptq|awq|aqlm|gguf|fp8|nvfp4|mxfp4|int4|int8)(?:-[\w.]+)*$`)

// unknownName is the error for a model that nothing on this host describes.
func unknownName(name string, online bool) error {
	lower := strings.ToLower(name)
	if _, repository, isURL := strings.Cut(name, "://huggingface.co/"); isURL {
		owner, rest, _ := strings.Cut(repository, "/")
		base, _, _ := strings.Cut(rest, "/")
		return fault.Inputf("%q is an address, expected the name of a model", name).
			WithHint("give it as --model " + owner + "/" + base)
	}
	if match := quantized.FindStringSubmatchIndex(lower); match != nil {
		return quantizedName(name, lower[:match[0]], lower[match[2]:match[3]])
	}
	const files = "; a config.json, a *.safetensors file or a folder that holds one will do as well"
	hint := "'plimsoll models' lists the catalog" + files
	last := lower[strings.LastIndexByte(lower, '/')+1:]
	near := nearest(last, Catalog())
	if known, c := ofFolder(name); c != nil && looksLikePath(name) {
		return fault.File(name).Inputf("there is no such file or folder").
			WithHint(fmt.Sprintf("give the path of its config.json; or --model %s for the sizes of the model of this "+
				"name", known))
	}
	if near == "" && looksLikePath(name) {
		return fault.File(name).Inputf("there is no such file or folder").
			WithHint("give the path of a config.json, of a *.safetensors file or of a folder that holds one, or a " +
				"name that 'plimsoll models' lists")
	}
	like := alike(last)
	if near == "" && like != "" {
		hint = like + files
	}
	if hub.IsRepository(name) && !online {
		hint = "--online asks the Hugging Face hub; or download its config.json and name that file"
	}
	if near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return fault.Inputf("unknown model %q: no file, no folder, no model of the catalog and none in the cache of "+
		"huggingface_hub has that name", name).WithHint(hint)
}

// looksLikePath reports whether a name can only be that of a file or of a folder.
func looksLikePath(name string) bool {
	ends := slices.ContainsFunc([]string{".json", ".safetensors", ".gguf", ".bin", ".pt", ".yaml", ".yml"},
		func(end string) bool { return strings.HasSuffix(strings.ToLower(name), end) })
	return ends || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "~") || filepath.IsAbs(name)
}

// alike says which models of the catalog have names that begin as a name does, or are of the same series. It is empty
// where there are none.
func alike(name string) string {
	const most = 8
	apart := func(r rune) bool { return strings.ContainsRune("-_ ", r) }
	words := strings.FieldsFunc(joint.ReplaceAllString(name, "$1-$3"), apart)
	for n := len(words); n > 0; n-- {
		var found []string
		for _, known := range Catalog() {
			begins := strings.Join(words[:n], "-")
			rest, same := strings.CutPrefix(joint.ReplaceAllString(known, "$1-$3"), begins)
			if same && len(begins) > 2 && !strings.ContainsAny(rest[:min(1, len(rest))], ".0123456789") {
				found = append(found, known)
			}
		}
		switch {
		case len(found) == 1 && n == len(words):
			return fmt.Sprintf("did you mean %q? 'plimsoll models' lists the catalog", found[0])
		case len(found) > most || len(found) > 0 && n == 1:
			return fmt.Sprintf("'plimsoll models %s' lists those with a similar name", strings.Join(words[:n], " "))
		case len(found) > 0:
			return "the catalog has " + strings.Join(found, ", ")
		}
	}
	return ""
}

// Before returns the name in the catalog of the model whose weights a repository has in a quantization ("gptq"), or the
// name itself.
func Before(name, quantization string) string {
	lower := strings.ToLower(name)
	match := quantized.FindStringSubmatchIndex(lower)
	if match == nil || lower[match[2]:match[3]] != strings.ToLower(quantization) {
		return name
	}
	if known, ok := fromHubName(path.Base(lower[:match[0]])); ok {
		return known
	}
	return name
}

// usualPacking matches the ends of names of repositories whose weights have the usual form of their quantization: GPTQ
// and AWQ in 4 bits with a scale for 128 inputs, AQLM in 2 bits with a code of 16 bits for 8 inputs.
var usualPacking = lazyregexp.New(
	`-(?:(gptq|awq)(?:-(?:int4|4bits?)(?:-(?:128g|g128))?)?|(aqlm)-2bit-1x16(?:-hf)?)$`)

// UsualPacking returns the quantization that the name of a repository tells, "gptq", "awq" or "aqlm", or "" if it tells
// none or an unusual form.
func UsualPacking(name string) string {
	match := usualPacking.FindStringSubmatch(strings.ToLower(name))
	if match == nil || !hub.IsRepository(name) {
		return ""
	}
	return match[1] + match[2]
}

// quantizedName is the error for the name of quantized weights of a model that
// is called base without them.
func quantizedName(name, base, kind string) error {
	known, ok := fromHubName(path.Base(base))
	if !ok {
		known = "config.json"
	}
	hint := fmt.Sprintf("to train adapters on 4-bit weights: --model %s --quantization nf4; to train the weights: "+
		"--model %[1]s", known)
	switch kind {
	case "gptq", "awq":
		hint = fmt.Sprintf("--model %s --quantization %s is 4 bits with a scale for 128 inputs; for others give "+
			"--quantization with the config.json of the repository", known, kind)
	case "aqlm":
		hint = fmt.Sprintf("--model %s --quantization aqlm is 2 bits, a code of 16 bits for 8 inputs; for others give "+
			"--quantization with the config.json of the repository", known)
	case "int8":
		hint = fmt.Sprintf("to train adapters on 8-bit weights: --model %s --quantization int8", known)
	}
	if !ok {
		hint += " (the file of the model before quantization)"
	}
	return fault.Inputf("%q names weights that are quantized (%s), and the name does not say how they are trained",
		name, strings.ToUpper(kind)).WithHint(hint)
}

var (
	token = lazyregexp.New(`[0-9]+(?:\.[0-9]+)*|[a-z]+`)
	unit  = lazyregexp.New(`[0-9]([a-z])(?:[^a-z]|$)`)
)

// nearest returns the candidate that a name misspells, or "". Numbers have to be
// the same: another size is another model, and so is another short word (xl, xxl).
// A word that some candidate has is no misspelling: mixtral is not mistral.
func nearest(name string, candidates []string) string {
	words, units := map[string]bool{}, map[string]bool{}
	for _, c := range candidates {
		for _, match := range unit.FindAllStringSubmatch(c, -1) {
			units[match[1]] = true
		}
		for _, word := range token.FindAllString(c, -1) {
			words[word] = true
		}
	}
	have := token.FindAllString(name, -1)
	fits := func(c string) bool {
		want := token.FindAllString(c, -1)
		if len(want) != len(have) {
			return false
		}
		for i, word := range have {
			fixed := words[word] || word[0] <= '9' || len(word) < 4
			letters := len(word) == 1 && len(want[i]) == 1 && word > "9" && want[i] > "9"
			if letters && i > 0 && have[i-1] < "a" && !units[word] {
				continue // 7v is 7b: no name has that letter behind a number
			}
			if word != want[i] && (fixed || fault.Nearest(word, want[i:i+1]) == "") {
				return false
			}
		}
		return true
	}
	for _, c := range candidates {
		if fits(c) {
			return c
		}
	}
	return ""
}
