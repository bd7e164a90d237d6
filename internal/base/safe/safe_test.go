package safe

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	const token = "hf_abcdefghijklmnopQRSTUVWXYZ012345"
	for text, want := range map[string]string{
		"":                                               "",
		"a.json:1:2: what\n  hint: x":                    "a.json:1:2: what\n  hint: x",
		"\tnäme \"日本\"":                                  "\tnäme \"日本\"",
		"ll\x1b]0;title\x07\x1b[2J":                      `ll\u001b]0;title\u0007\u001b[2J`,
		"c1 \u009b31m, back\rspace":                      `c1 \u009b31m, back\u000dspace`,
		"not UTF-8: \xff\x9b":                            `not UTF-8: \xff\x9b`,
		"right \u202eto\u2066 left":                      `right \u202eto\u2066 left`,
		"no\u200bwidth\ufeff":                            `no\u200bwidth\ufeff`,
		"line\u2028 paragraph\u2029":                     `line\u2028 paragraph\u2029`,
		"tag \U000e0041":                                 `tag \udb40\udc41`,
		"python t.py --hub-token " + token:               "python t.py --hub-token hf_" + Redacted,
		"HF_TOKEN=" + token + " run":                     "HF_TOKEN=hf_" + Redacted + " run",
		`["t.py", "--password", "x1", "--epochs", "3"]`:  `["t.py", "--password", "` + Redacted + `", "--epochs", "3"]`,
		`{"wandb_api_key": "0123456789abcdef", "lr": 1}`: `{"wandb_api_key": "` + Redacted + `", "lr": 1}`,
		"db_password: hunter2\nlr: 1":                    "db_password: " + Redacted + "\nlr: 1",
		"AWS_SECRET_ACCESS_KEY=abc/def+":                 "AWS_SECRET_ACCESS_KEY=" + Redacted,
		"id AKIAABCDEFGHIJKLMNOP":                        "id AKIA" + Redacted,
		"git clone https://me:pw@host/x":                 "git clone https://me:" + Redacted + "host/x",
		"Authorization: Bearer abcdefghijklmnop1234":     "Authorization: Bearer " + Redacted,
		"--token --epochs 3":                             "--token --epochs 3",
		"--token $HF_TOKEN":                              "--token $HF_TOKEN",
		"use_auth_token: true":                           "use_auth_token: true",
		"pad_token: <|endoftext|>":                       "pad_token: <|endoftext|>",
		"tokens: 123456789":                              "tokens: 123456789",
		"max_tokens=16384 token_count=9":                 "max_tokens=16384 token_count=9",
		"--tokenizer meta-llama/Llama-3":                 "--tokenizer meta-llama/Llama-3",
		"sort_key=length_of_text":                        "sort_key=length_of_text",
		"/etc/passwd:1:1: not JSON":                      "/etc/passwd:1:1: not JSON",
		"the token was too long":                         "the token was too long",
		"KeyError: 'model.embed_tokens'":                 "KeyError: 'model.embed_tokens'",
	} {
		if got := Text(text); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add("--token abcdefghijkl\x1b")
	f.Add("a: b: c=d e")
	f.Fuzz(func(t *testing.T, text string) {
		shown := Text(text)
		isDocument := utf8.ValidString(text) && !strings.Contains(text, "\r") && json.Valid([]byte(text))
		if isDocument && !json.Valid([]byte(shown)) {
			t.Errorf("%q is shown as %q, which is no JSON", text, shown)
		}
		if !utf8.ValidString(shown) || strings.ContainsFunc(shown, func(r rune) bool {
			return r != '\t' && r != '\n' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
		}) {
			t.Errorf("%q is shown as %q", text, shown)
		}
	})
}

func TestLine(t *testing.T) {
	if got, want := Line("a\nfits: all\x1b[2J"), `a\nfits: all\u001b[2J`; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestDocumentsStayValid: what is taken out of a document leaves a document.
func TestDocumentsStayValid(t *testing.T) {
	for _, text := range []string{
		`{"token":"abcdefgh\"ijkl\\","lr":1}`, `{"api_key":1234567890123}`, `{"password":-1.5e3,"a":[1]}`,
		`{"credentials":{"a":1}}`, `{"secret":["a","b"]}`, `["--password","a\\","--token","\"abcdefghij"]`,
		`{"key":"-----BEGIN RSA PRIVATE KEY-----\nabc=\n\"quoted\""}`, `{"password":"","secret":"\\"}`,
		`{"url":"https://me:p\"w@host"}`,
	} {
		if !json.Valid([]byte(text)) {
			t.Fatalf("%s is no JSON", text)
		}
		if shown := Text(text); !json.Valid([]byte(shown)) {
			t.Errorf("%s is shown as %s", text, shown)
		}
	}
}
