package safe

import (
	"slices"
	"strings"
	"sync/atomic"

	"plimsoll/internal/base/lazyregexp"
)

// Redacted stands for a secret.
const Redacted = "[redacted]"

var secretsShown atomic.Bool

// ShowSecrets leaves secrets in all that this process shows from now on.
func ShowSecrets() { secretsShown.Store(true) }

// form is a kind of secrets that are known by their form. What the first group matches stays.
type form struct {
	mark       string // of a text that may have one: to look for it costs little
	expression *lazyregexp.Regexp
}

var forms = []form{
	{"hf_", lazyregexp.New(`\b(hf_)[A-Za-z0-9]{16,}`)},                                                       // huggingface.co
	{"gh", lazyregexp.New(`\b(gh[pousr]_)[A-Za-z0-9]{16,}`)},                                                 // github.com
	{"github_pat_", lazyregexp.New(`\b(github_pat_)\w{16,}`)},                                                // github.com
	{"glpat-", lazyregexp.New(`\b(glpat-)[\w-]{16,}`)},                                                       // gitlab.com
	{"AKIA", lazyregexp.New(`\b(AKIA)[0-9A-Z]{16}\b`)},                                                       // access keys of AWS
	{"ASIA", lazyregexp.New(`\b(ASIA)[0-9A-Z]{16}\b`)},                                                       // and those that expire
	{"sk-", lazyregexp.New(`\b(sk-)[\w-]{16,}`)},                                                             // OpenAI, Anthropic
	{"nvapi-", lazyregexp.New(`\b(nvapi-)[\w-]{16,}`)},                                                       // NVIDIA
	{"pypi-", lazyregexp.New(`\b(pypi-)[\w-]{16,}`)},                                                         // pypi.org
	{"xox", lazyregexp.New(`\b(xox[abposr]-)[\w-]{16,}`)},                                                    // Slack
	{"wandb_v1_", lazyregexp.New(`\b(wandb_v1_)\w{16,}`)},                                                    // wandb.ai
	{"AIza", lazyregexp.New(`\b(AIza)[\w-]{30,}`)},                                                           // Google
	{"eyJ", lazyregexp.New(`\b(ey)J[\w-]{8,}\.ey[\w-]{8,}\.[\w-]+`)},                                         // JSON Web Tokens, RFC 7519
	{"earer ", lazyregexp.New(`\b([Bb]earer )[\w.~+/=-]{16,}`)},                                              // RFC 6750
	{"asic ", lazyregexp.New(`\b([Bb]asic )[\w.~+/=-]{16,}`)},                                                // RFC 7617
	{"://", lazyregexp.New(`(://[^/\s:@"]*:)[^/\s@"]+@`)},                                                    // a password in an address, RFC 3986
	{"PRIVATE KEY-----", lazyregexp.New(`(-----BEGIN [A-Z ]*PRIVATE KEY-----)(?:\\[nr]|[A-Za-z0-9+/=\s])+`)}, // RFC 7468
}

// secretWords are parts of names that say that their value is secret, in small letters.
var secretWords = []string{"passw", "passphrase", "secret", "credential", "token", "key"}

// namesSecrets reports whether some name in a text may say that its value is secret. Every record of a recording is
// looked through, and an expression that ignores case takes ten times as long.
func namesSecrets(text string) bool {
	text = strings.ToLower(text)
	return slices.ContainsFunc(secretWords, func(word string) bool { return strings.Contains(text, word) })
}

// assignment matches a name, what stands between it and its value, and the value: of a shell, a configuration or JSON.
// A name may be an option, whose value is the next word.
var assignment = lazyregexp.New(
	`(?:^|[\s"'{(\[,;?&])(--?[A-Za-z][\w.-]*|[A-Za-z][\w.-]*)("?\s*[=:]\s*"?|'\s*:\s*'|[ \t]+|",\s*")((?:\\.|[^\s"',;&|(){}\[\]\\])+)`)

// redact returns a text without secrets.
func redact(text string) string {
	if secretsShown.Load() {
		return text
	}
	for _, f := range forms {
		if strings.Contains(text, f.mark) {
			text = f.expression.ReplaceAllString(text, "${1}"+Redacted)
		}
	}
	if !namesSecrets(text) {
		return text
	}
	return assigned(text)
}

// assigned redacts the values of names that say that they are secret. Values may themselves be names of values, as in
// "--token --epochs 3", so the search goes on behind the name alone.
func assigned(text string) string {
	var b strings.Builder
	for {
		at := assignment.FindStringSubmatchIndex(text)
		if at == nil {
			b.WriteString(text)
			return b.String()
		}
		name, between, value := text[at[2]:at[3]], text[at[4]:at[5]], text[at[6]:at[7]]
		isOption := strings.HasPrefix(name, "-")
		if (isOption || strings.ContainsAny(between, "=:")) && isSecretName(name) && isSecretValue(name, value) {
			b.WriteString(text[:at[5]] + standIn(between))
			text = text[at[7]:]
			continue
		}
		b.WriteString(text[:at[3]])
		text = text[at[3]:]
	}
}

// standIn returns what stands for a secret behind what is between its name and it. A number in JSON has no quotes, and
// what stands for it needs them.
func standIn(between string) string {
	if strings.HasPrefix(between, `"`) && !strings.HasSuffix(between, `"`) {
		return `"` + Redacted + `"`
	}
	return Redacted
}

// Words of names. A name that has one of always is of a secret. One that ends in a word of lasts is, if the word before
// it is a key of the map, and "token" alone is, too: "pad_token" and "sort_key" are none.
var (
	always = []string{"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey"}
	lasts  = map[string][]string{
		"token": {"", "hub", "hf", "auth", "access", "api", "bearer", "refresh", "session", "github", "gitlab", "wandb",
			"security", "huggingface", "comet", "neptune", "clearml"},
		"key": {"api", "access", "private", "wandb", "encryption", "account", "license", "signing"},
	}
)

// isSecretName reports whether a name says that its value is secret.
func isSecretName(name string) bool {
	words := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool { return strings.ContainsRune("-_.", r) })
	if len(words) == 0 {
		return false
	}
	if slices.ContainsFunc(words, func(w string) bool { return slices.Contains(always, w) }) {
		return true
	}
	before := ""
	if len(words) > 1 {
		before = words[len(words)-2]
	}
	return slices.Contains(lasts[words[len(words)-1]], before)
}

// isSecretValue reports whether a value can be a secret: not a switch, a reference to a variable, or another option. A
// token or key has no less than eight characters.
func isSecretValue(name, value string) bool {
	switch strings.ToLower(value) {
	case "true", "false", "none", "null", "yes", "no", "auto", strings.ToLower(Redacted):
		return false
	}
	if strings.HasPrefix(value, "$") || strings.HasPrefix(value, "-") || strings.Contains(value, "[redacted") {
		return false
	}
	lower := strings.ToLower(name)
	return !strings.HasSuffix(lower, "token") && !strings.HasSuffix(lower, "key") || len(value) >= 8
}
