package model

import "testing"

// TestAbsent finds models by the names of folders that are on other hosts.
func TestAbsent(t *testing.T) {
	for path, want := range map[string]string{
		"/dockerdata/cache/Qwen2-VL-7B-Instruct/":                                   "qwen2-vl-7b",
		"./models/Meta-Llama-3.1-8B-Instruct":                                       "llama-3.1-8b",
		`G:\models\llama3\LLM-Research\Meta-Llama-3-8B-Instruct`:                    "llama-3-8b",
		"/cache/modelscope/hub/models/Qwen/Qwen2___5-7B-Instruct":                   "qwen2.5-7b",
		"/hf/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/6e6556e8ce728c7b3e438d": "qwen2.5-vl-7b",
		"/data3/Qwen.Qwen2.5-VL-7B-Instruct":                                        "qwen2.5-vl-7b",
		"/hub/somebody__Qwen3-8B":                                                   "qwen3-8b",
		"./Qwen3-1_7B":                                                              "qwen3-1.7b",
		"/models/Qwen3-8B/checkpoint-500":                                           "",
		"/models/My-Qwen3-8B":                                                       "",
		"/models/Qwen3-8B-unsloth-bnb-4bit":                                         "",
		"/models/Qwen3-9B":                                                          "",
		"Qwen3-8B":                                                                  "",
		"testdata/variants":                                                         "",
	} {
		got := ""
		if m := LoadAbsent(path); m != nil {
			got = m.Name
			if m.Namesake == nil || m.Namesake.Name != path {
				t.Errorf("%s: nothing says that only the name tells", path)
			}
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
}
