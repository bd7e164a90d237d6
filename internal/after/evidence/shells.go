package evidence

import (
	"strings"
	"unicode/utf8"

	"plimsoll/internal/base/lazyregexp"
)

// signalWord is how a C library describes a signal in some language. Shells show the description.
type signalWord struct {
	signal int
	words  []string
	// alone is set if the words by themselves are a line of a shell, and no usual word of a program.
	alone bool
}

// signalWords are the descriptions in glibc's translations (po/*.po of glibc 2.36), but for those in English.
// An older release called SIGKILL otherwise in traditional Chinese.
var signalWords = []signalWord{
	{SIGKILL, []string{"Забіты", "Безусловно прекъснат", "Matat", "Zabit (SIGKILL)", "Dræbt", "Getötet", "Σκοτώθηκε",
		"Buĉita", "Terminado (killed)", "Tapettu", "Processus arrêté", "Matado", "Ubijen", "Kilőve", "Terbunuh",
		"Ucciso", "強制終了", "죽었음", "Nutraukta (killed)", "Drept", "Geëlimineerd", "Unicestwiony", "Morto",
		"Убито", "Zabitý", "Pobit", "Убијен", "Dödad", "Süreç durduruldu", "Вбито", "Bị buộc kết thúc", "已杀死",
		"強制結束", "已砍掉"}, true},
	{SIGSEGV, []string{"Збой сэгмэнтацыі", "Нарушение на разделянето(segfault)", "Violació de segment",
		"Neoprávněný přístup do paměti (SIGSEGV)", "Segmentfejl", "Speicherzugriffsfehler",
		"Σφάλμα κατάτμησης (segmentation fault)", "Adres-eraro", "Violación de segmento", "Muistialueen ylitys",
		"Erreur de segmentation", "Fallo de segmento", "Segmentacijska greška", "Szegmentálási hiba",
		"Kerusakan segmentasi", "Errore di segmentazione", "세그멘테이션 오류", "Segmentavimo klaida",
		"Minnesegmentsfeil", "Segmentatiefout", "Naruszenie ochrony pamięci", "Falta de segmentação",
		"Falha de segmentação", "Ошибка сегментирования", "Chyba segmentácie", "Napaka segmentacije",
		"Неуспех сегментације", "Segmenteringsfel", "Parçalama arızası", "Помилка адресування", "Lỗi phân đoạn",
		"段错误", "程式記憶體區段錯誤"}, true},
	{SIGBUS, []string{"Памылка шыны", "Грешка на адресната шина", "Error de bus",
		"Chyba na sběrnici (neplatná adresa) (SIGBUS)", "Busfejl", "Bus-Zugriffsfehler", "Σφάλμα στον δίαυλο(bus)",
		"Bus-eraro", "Error del bus", "Väylävirhe", "Erreur du bus", "Erro no bus de datos", "Sabirnička greška",
		"Busz hiba", "Errore di bus", "バスエラー", "버스 오류", "Magistralės klaida", "Bussfeil", "Busfout",
		"Błąd szyny", "Erro de bus", "Erro no barramento", "Ошибка шины", "Chyba na zbernici", "Napaka vodila",
		"Грешка сабирнице", "Bussfel", "Veri yolu hatası", "Помилка каналу обміну даними", "Lỗi bus", "总线错误",
		"匯流排錯誤"}, true},
	{SIGABRT, []string{"Прекъснат", "Avortat", "Neúspěšně ukončen (SIGABRT)", "Afbrudt (SIGABRT)", "Abgebrochen",
		"Ακυρώθηκε", "Abortita", "Abortado", "Keskeytetty", "Abandon", "Prekid", "Félbeszakítva", "Dibatalkan",
		"Annullato", "中止", "중지됨", "Nutraukta (aborted)", "Avbrutt (SIGABRT)", "Afgebroken", "Przerwane",
		"Аварийный останов", "Zrušené", "Prekinjen", "Прекинуто", "Avbruten (SIGABRT)", "İptal edildi", "Перервано",
		"Bị hủy bỏ", "已放弃"}, false},
	{SIGTERM, []string{"Завершаны", "Прекратен", "Terminat", "Ukončen (SIGTERM)", "Termineret", "Beendet",
		"Τερματίστηκε", "Ĉesigita", "Terminado", "Päätetty", "Complété", "Završeno", "Befejeződött", "Terakhiri",
		"Terminato", "종료됨", "Užbaigta (terminated)", "Terminert", "Beëindigd", "Zakończony", "Завершено",
		"Ukončené", "Zaključen", "Окончано", "Avslutad", "Sonlandırıldı", "Припинено", "Đã kết thúc", "已终止",
		"終止"}, false},
}

// foreignSignal returns the signal that a text begins with in another language than English, or 0. Behind the word may
// stand "(core dumped)" in that language, and the command after two spaces.
func foreignSignal(text string, alone bool) int {
	for _, s := range signalWords {
		if alone && !s.alone {
			continue
		}
		for _, word := range s.words {
			if rest, found := strings.CutPrefix(text, word); found && behindSignal.MatchString(rest) &&
				!(alone && commandBehind.MatchString(rest)) {
				return s.signal
			}
		}
	}
	return 0
}

var (
	behindSignal  = lazyregexp.New(`^(?: *[(（][^)）]*[)）])?(?:\s*$|\s{2,})`)
	commandBehind = lazyregexp.New(`\s{2,}\S`)
)

// signalLiterals are the first parts of the descriptions, without a space that a terminal might break.
func signalLiterals() (literals []string) {
	for _, s := range signalWords {
		for _, word := range s.words {
			first, _, _ := strings.Cut(word, " ")
			if utf8.RuneCountInString(first) < 3 { // too frequent a text to look for
				first = word
			}
			literals = append(literals, first)
		}
	}
	return literals
}

// shellPatterns are what bash says of the end of a process in other languages than English: of a line of a script (with
// the word for "line" before or behind its number), of a job, or the signal alone.
var shellPatterns = []pattern{
	{ // bash: jobs.c, execute_cmd.c, error.c; glibc: string/strsignal.c
		name:     "shell of any language",
		literals: signalLiterals(),
		expression: `^(?:[^:：]+?[:：, ] ?(?:\S{1,12} ?\d+(?: ?[^\s:：]+)?|\d+[.]? \S{1,9}) ?[:：] *(?P<pid>\d+) |` +
			`\[\d+\][+-]? +(?:(?P<pid2>\d+) )?|(?P<alone>(?:.*\]\s*)?))(?P<text>\S.*)$`,
		kind: TrainerLog, picky: true,
		fact: func(m *match) Fact {
			alone := m.get("pid")+m.get("pid2") == "" && !strings.HasPrefix(m.whole, "[")
			signal, pid := foreignSignal(m.get("text"), alone), m.integer("pid", m.integer("pid2", 0))
			switch signal {
			case 0:
				return nil
			case SIGBUS:
				return BusError{PID: pid}
			}
			return ProcessEnded{By: "shell", Rank: m.rank, LocalRank: NoRank, Signal: signal, PID: pid}
		},
	},
}
