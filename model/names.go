package model

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"plimsoll/fault"
	"plimsoll/hub"
)

// authors are the organizations on the hub whose models the catalog has.
// Another's model of the same name may have more tokens, so only its config.json
// tells.
var authors = []string{
	"01-ai", "allenai", "bigcode", "bigscience", "bytedance-seed", "cerebras", "codellama", "cohereforai", "coherelabs",
	"deepseek-ai", "eleutherai", "facebook", "google", "google-t5", "huggingfacetb", "ibm-granite", "meta-llama",
	"microsoft", "minimaxai", "mistralai", "nvidia", "openai", "openai-community", "openlm-research", "qwen",
	"stabilityai", "tencent", "thudm", "tiiuae", "tinyllama", "togethercomputer", "zai-org",
	"huggyllama", "nousresearch", // have copies of Meta's models
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
	"redpajama-incite-base-3b-v1":     "redpajama-incite-3b",
	"redpajama-incite-chat-3b-v1":     "redpajama-incite-3b",
	"qwq-32b":                         "qwen2.5-32b",
	"deepseek-v2.5":                   "deepseek-v2",
	"deepseek-coder-v2":               "deepseek-v2",
	"deepseek-coder-v2-lite":          "deepseek-v2-lite",
	"deepseek-v3-0324":                "deepseek-v3",
	"deepseek-r1":                     "deepseek-v3",
	"deepseek-r1-0528":                "deepseek-v3",
	"deepseek-r1-distill-llama-8b":    "llama-3.1-8b",
	"deepseek-r1-distill-llama-70b":   "llama-3.1-70b",
	"deepseek-r1-distill-qwen-7b":     "qwen2.5-7b",
	"deepseek-r1-distill-qwen-14b":    "qwen2.5-14b",
	"deepseek-r1-distill-qwen-32b":    "qwen2.5-32b",
}

// tunings end the names of models that have the sizes of the model before them.
var tunings = []string{"-instruct", "-chat", "-base", "-hf", "-it", "-deduped", "-thinking", "-2507"}

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

func fromHubName(name string) (known string, ok bool) {
	name = strings.TrimPrefix(name, "meta-")
	name = strings.Replace(name, "qwen2.5-coder-", "qwen2.5-", 1)
	for {
		name = cmp.Or(irregular[name], name)
		if _, ok := catalogConfig(name); ok {
			return name, true
		}
		shorter := name
		for _, tuning := range tunings {
			shorter = strings.TrimSuffix(shorter, tuning)
		}
		if shorter == name {
			return "", false
		}
		name = shorter
	}
}

// quantized matches the ends of names of repositories with quantized weights.
var quantized = regexp.MustCompile(`-(?:unsloth-)?(bnb-4bit|gptq|awq|aqlm|gguf|fp8|int4|int8)(?:-[\w.]+)*$`)

// unknownName is the error for a model that nothing on this host describes.
func unknownName(name string, online bool) error {
	lower := strings.ToLower(name)
	if match := quantized.FindStringSubmatchIndex(lower); match != nil {
		return quantizedName(name, lower[:match[0]], lower[match[2]:match[3]])
	}
	hint := "'plimsoll plan --help' lists the catalog; a config.json, a *.safetensors file or a folder that holds " +
		"one will do as well"
	if hub.IsRepository(name) && !online {
		hint = "--online asks the Hugging Face hub; or download its config.json and name that file"
	}
	if near := nearest(lower[strings.LastIndexByte(lower, '/')+1:], Catalog()); near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return fault.Inputf("unknown model %q: no file, no folder, no model of the catalog and none in the cache of "+
		"huggingface_hub has that name", name).WithHint(hint)
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
		hint = fmt.Sprintf("AQLM's codes are not planned yet; --model %s --quantization nf4 takes more memory", known)
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
	token = regexp.MustCompile(`[0-9]+(?:\.[0-9]+)*|[a-z]+`)
	unit  = regexp.MustCompile(`[0-9]([a-z])(?:[^a-z]|$)`)
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
